"""FA-1: imported checkpoints of every family compute what transformers computes, cold and warm; and this can fail."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

from megatron_ext.config import BatchingConfig, CacheConfig, RequestParams
from megatron_ext.config.model_fields import MULTIPLIERS
from megatron_ext.config.source import HfOverrides
from megatron_ext.mcore import context
from megatron_ext.mcore.assemble import build_engine
from megatron_ext.mcore.layers import attention
from megatron_ext.models import build
from megatron_ext.models.load import LoadedModel
from megatron_ext.ops.paged_attention import reference
from megatron_ext.scheduling.record import RequestRecord
from tests.on_request import long_except
from tests.unit_tests.models.huggingface import oracles as oracle
from tests.unit_tests.models.huggingface.oracles import LAST, SHAPES, engine_excess, excess, load_hf
from tests.unit_tests.support.caching import CachingDriver
from tests.unit_tests.support.driver import Driver
from tests.unit_tests.support.hybrid_caching import HybridDriver

BLOCK = 16
LEAST_MARGIN = 1e-5
LENGTHS = (1, 3, 65, 300)


@pytest.mark.parametrize("name", long_except([*LAST.values(), *list(SHAPES)[::2]], SHAPES))
def test_logits_equal(name: str, oracles) -> None:
    """FA-1, M1-1, LA-2: full forwards, fp32; the greedy token of each position follows."""
    theirs, directory = oracles(name)
    ours = load_hf(directory).model
    for length in LENGTHS:
        tokens = oracle.prompt(length, seed=length)
        expected = oracle.their_logits(theirs, tokens)
        assert expected.std() > 0.3, "flat logits would make this test blind"
        assert oracle.routing_margin(theirs, tokens) > LEAST_MARGIN, "rounding alone may choose other experts"
        assert oracle.largest_excess(oracle.our_logits(ours, tokens), expected) <= 1, length


def driver_of(loaded: LoadedModel, **options: object) -> CachingDriver:
    kind = HybridDriver if loaded.config.is_hybrid else CachingDriver
    return kind(loaded.model, loaded.config, block_size=BLOCK, max_requests=8, **options)


def sight(driver: CachingDriver, number: int, prompt: Sequence[int], count: int = 4) -> int:
    """Serve one prompt to its end, and return the tokens that it skipped."""
    driver.add(number, prompt, num_tokens_to_generate=count)
    driver.run()
    return driver.records[number].skipped_prefill_token_count


# Families with every kind of state, mixers beside attention, experts, windows, sinks and biases among them.
WARM = [LAST[kind] for kind in ("falcon_h1", "lfm2_moe", "jamba", "qwen3_next")] + ["llama, biases, yarn", "gpt-oss"]


@pytest.mark.parametrize("options", [{"max_tokens": 48}, pytest.param({"max_tokens": 1024}, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", long_except(WARM, SHAPES))
def test_warm_starts_equal_transformers(name: str, options: dict, oracles) -> None:
    """FA-1, M1-1, LA-2, HY-3, HY-4, EX-1: a prompt twice, with another end, and with the next turn of the chat."""
    theirs, directory = oracles(name)
    driver, prompt = driver_of(load_hf(directory), **options), oracle.prompt(100, seed=1)
    sight(driver, 0, prompt, 13)
    driver.add(1, prompt)
    driver.add(2, [*prompt[:70], *oracle.prompt(9, seed=2)])
    driver.add(3, [*prompt, *driver.records[0].generated_tokens, *oracle.prompt(5, seed=3)])
    driver.run()
    sight(driver, 4, [*prompt[:70], *oracle.prompt(12, seed=4)])
    assert driver.skipped(*range(5)) == [0, 96, 64, 112, 64]
    for request_id in range(5):
        assert engine_excess(driver, request_id, theirs) <= 1


def serve(loaded: LoadedModel, prompts: Sequence[Sequence[int]], *, is_cached: bool) -> list[RequestRecord]:
    """The first one alone, which leaves its blocks and states, then the others together."""
    batching = BatchingConfig(block_size=BLOCK, block_count=200, max_requests=8, max_tokens=64)
    slots = 20 if is_cached and loaded.config.is_hybrid else None
    cache = CacheConfig(enable_prefix_caching=is_cached, snapshot_slots=slots)
    engine = build_engine(loaded.model, loaded.config, loaded.tokenizer, batching, cache, dtype=loaded.dtype)
    wanted = RequestParams(num_tokens_to_generate=10, return_log_probs=True, skip_prompt_log_probs=True)
    return [record for batch in (prompts[:1], prompts[1:]) for record in engine.generate(batch, wanted)]


# Of each family one whose routers do not waver.
NARROW = [name for name in LAST.values() if "moe" not in name.lower() and not name.startswith("gpt-oss")]


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", long_except([LAST["mamba2"], LAST["qwen3"]], NARROW))
def test_cache_on_beside_off(name: str, bf16: bool, oracles) -> None:
    """FA-1, HY-14: greedy tokens are equal in fp32; in 16 bits within the limits, with no more rounding than theirs."""
    theirs, directory = oracles(name)
    loaded, prompt = load_hf(directory, bf16=bf16), oracle.prompt(70, seed=1)
    prompts = [prompt, *([*prompt[: 64 + number], *oracle.prompt(7, seed=number)] for number in range(5))]
    off, on = (serve(loaded, prompts, is_cached=is_cached) for is_cached in (False, True))
    assert sum(record.skipped_prefill_token_count for record in on) == 5 * 64
    gaps = torch.tensor([gap for pair in zip(off, on, strict=True) for gap in log_prob_gaps(*pair)])
    assert len(gaps) > 30
    assert gaps.quantile(0.95) <= math.log(1.05)
    assert gaps.max() <= math.log(1.2)
    if bf16:
        ours, others = oracle.rounding(directory, theirs)
        assert ours < 1.3 * others
    else:
        assert [one.generated_tokens for one in on] == [one.generated_tokens for one in off]
        assert gaps.max() <= 1e-3


def log_prob_gaps(one: RequestRecord, other: RequestRecord) -> list[float]:
    """Absolute differences of log-probs before the first token that differs."""
    tokens = zip(one.generated_tokens, other.generated_tokens, strict=True)
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], tokens)
    return [abs(a - b) for a, b, _ in zip(one.generated_log_probs, other.generated_log_probs, same, strict=False)]


# Negative controls

STATES = [(LAST[kind], which) for kind in ("mamba2", "mamba", "qwen3_next", "lfm2") for which in ("conv", "ssm")]


@pytest.mark.parametrize(("name", "which"), [*STATES[:-1], (LAST["qwen3"], "keys")])
def test_the_comparison_sees_lost_contents(name: str, which: str, oracles) -> None:
    """The comparison fails if one layer of all snapshots, or of all cached keys, is zero."""
    theirs, directory = oracles(name)
    driver = driver_of(load_hf(directory), max_tokens=400)
    assert sight(driver, 0, oracle.prompt(100, seed=1)) == 0
    if which == "keys":
        driver.context.memory_buffer[0, 1] = 0.0
    else:
        getattr(driver.context.allocated.snapshots, which)[1] = 0.0
    assert sight(driver, 1, oracle.prompt(100, seed=1)) == 96
    assert engine_excess(driver, 0, theirs) <= 1
    assert engine_excess(driver, 1, theirs) > 10


def worst_of_chunks(loaded: LoadedModel, theirs: nn.Module) -> float:
    """Difference from transformers of a prompt in chunks and what follows it."""
    driver = Driver(loaded.model, loaded.config, block_size=BLOCK, max_tokens=48)
    driver.add(0, oracle.prompt(100, seed=1), num_tokens_to_generate=8)
    driver.run()
    return engine_excess(driver, 0, theirs)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda positions: positions % 48,  # as if each chunk began at zero
        lambda positions: positions.clamp(max=63),  # as if decoding did not go on counting
    ],
    ids=["restarted", "stopped"],
)
def test_the_comparison_sees_wrong_positions(wrong: Callable, oracles, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, directory = oracles("llama")
    rotation_at = context.rotation_at
    monkeypatch.setattr(context, "rotation_at", lambda angles, at, *rest: rotation_at(angles, wrong(at), *rest))
    assert worst_of_chunks(load_hf(directory), theirs) > 10


@pytest.mark.parametrize("field", ["rotary_magnitude", "yarn_rotary_scaling_factor"])
def test_both_forwards_know_the_magnitude(field: str, oracles, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours over blocks and upstream's over a whole prompt each read a setting of their own."""
    theirs, directory = oracles("llama, biases, yarn")
    made = build.transformer_config
    monkeypatch.setattr(
        build, "transformer_config", lambda *args, **kwargs: dataclasses.replace(made(*args, **kwargs), **{field: 1.0})
    )
    loaded = load_hf(directory)
    is_right = (worst_of_chunks(loaded, theirs) <= 1, excess(loaded.model, theirs) <= 1)
    assert is_right == (field != "rotary_magnitude", field == "rotary_magnitude")


@pytest.mark.parametrize("window", [None, 41])
def test_the_engine_knows_the_window(window: int | None, oracles, monkeypatch: pytest.MonkeyPatch) -> None:
    """FA-4: an operator that sees all keys, or one more than it should."""
    theirs, directory = oracles("mistral, window")
    operator = attention.paged_attention
    monkeypatch.setattr(
        attention, "paged_attention", lambda *args, **options: operator(*args, **options | {"window": window})
    )
    assert worst_of_chunks(load_hf(directory), theirs) > 10


def test_a_window_that_no_sequence_is_longer_than_has_no_effect(oracles, monkeypatch: pytest.MonkeyPatch) -> None:
    """FA-4: the code without a window computes the output; one token more, and the window has an effect."""
    theirs, directory = oracles("mistral, window")
    loaded = load_hf(directory, hf_overrides=HfOverrides.of({"sliding_window": 140}))
    asked, planner = [], reference._planner
    monkeypatch.setattr(theirs.config, "sliding_window", None)
    assert excess(loaded.model, theirs, 140) <= 1
    assert excess(loaded.model, theirs, 200) > 10
    monkeypatch.setattr(reference, "_planner", lambda window: asked.append(window) or planner(window))
    driver = Driver(loaded.model, loaded.config, block_size=BLOCK)
    for request_id, count in enumerate((5, 13)):
        assert not any(asked)
        driver.add(request_id, oracle.prompt(135, seed=1), num_tokens_to_generate=count)
        driver.run()
        assert engine_excess(driver, 0, theirs) <= 1
    assert any(asked)


@torch.no_grad()
def test_the_oracle_has_a_long_memory(oracles) -> None:
    """States that the first tokens left decide the logits 250 tokens later, in a model without attention."""
    theirs, _ = oracles("nemotron, no attention")
    tokens, other = oracle.prompt(300, seed=5), oracle.prompt(50, seed=6)
    changed = oracle.their_logits(theirs, other + tokens[50:])
    assert oracle.largest_excess(changed[-1], oracle.their_logits(theirs, tokens)[-1]) > 100


def test_time_step_min_is_no_clamp(oracles) -> None:
    """Transformers clamps dt at `time_step_min` in its chunk path only; the import follows its one-token path."""
    theirs, directory = oracles("nemotron, MQA, other window, epsilon and chunk")
    ours, tokens = load_hf(directory).model, oracle.prompt(129, seed=4)
    clamped = type(theirs).from_pretrained(directory, dtype=torch.float32).eval()
    assert excess(ours, clamped) > 100
    cached, past = [], None
    with torch.no_grad():
        for token in tokens:
            step = theirs(torch.tensor([[token]]), past_key_values=past, use_cache=True)
            past = step.past_key_values
            cached.append(step.logits[0, 0])
    assert oracle.largest_excess(oracle.our_logits(ours, tokens), torch.stack(cached)) <= 1


Spoil = Callable[[nn.Module], object]
LAYERS = "decoder.layers."


def _swapped(name: str, rows: slice, other: slice) -> Spoil:
    def swap(model: nn.Module) -> None:
        weight = model.get_parameter(name)
        both = weight[rows].clone(), weight[other].clone()
        weight[other], weight[rows] = both

    return swap


def _exchanged(one: str, other: str) -> Spoil:
    """Two tensors, one in the other's place."""

    def exchange(model: nn.Module) -> None:
        first, second = model.get_parameter(one), model.get_parameter(other)
        both = first.clone(), second.clone()
        second.copy_(both[0])
        first.copy_(both[1])

    return exchange


def _rolled(name: str, by: int = 1) -> Spoil:
    """The rows of a tensor in another order."""
    return lambda m: m.get_parameter(name).copy_(m.get_parameter(name).roll(by, 0))


def _halves(name: str) -> Spoil:
    return lambda m: m.get_parameter(name).copy_(m.get_parameter(name).roll(m.get_parameter(name).shape[0] // 2, 0))


def _flipped(name: str) -> Spoil:
    return lambda m: m.get_parameter(name).copy_(m.get_parameter(name).flip(-1))


def _filled(name: str, value: float) -> Spoil:
    return lambda m: m.get_parameter(name).fill_(value)


QKV = "self_attention.linear_qkv.weight"
EXPERTS = "mlp.experts.local_experts"
GPT_OSS = "gpt-oss, listed windows, low limit"
QWEN = "qwen3_5, as many heads, other window, base and share, yarn"
CONTROLS: dict[str, dict[str, Spoil]] = {
    "llama": {
        "gate and up": _swapped(LAYERS + "1.mlp.linear_fc1.weight", slice(40), slice(40, 80)),
        "query and key of a head": _swapped(LAYERS + f"2.{QKV}", slice(8), slice(8, 16)),
        "key and value of a head": _swapped(LAYERS + f"0.{QKV}", slice(8, 16), slice(16, 24)),
        "halves of a query head": _swapped(LAYERS + f"0.{QKV}", slice(4), slice(4, 8)),
        "attention norm": _filled(LAYERS + "2.input_layernorm.weight", 1),
        "final norm": _filled("decoder.final_norm.weight", 1),
        "output": _swapped("output_layer.weight", slice(1), slice(1, 2)),
    },
    "llama, biases, yarn": {
        "bias of attention's output": _filled(LAYERS + "2.self_attention.linear_proj.bias", 0),
        "bias inside an MLP": _halves(LAYERS + "1.mlp.linear_fc1.bias"),
        "bias of an MLP's output": _filled(LAYERS + "3.mlp.linear_fc2.bias", 0),
    },
    "qwen2": {"queries and keys of the bias": _halves(LAYERS + "0.self_attention.linear_qkv.bias")},
    "mixtral": {"gate and up of an expert": _halves(LAYERS + f"1.{EXPERTS}.2.linear_fc1.weight")},
    "qwen3 moe, one expert a token, windows": {"router": _halves(LAYERS + "1.mlp.router.weight")},
    GPT_OSS: {
        "sinks": _filled(LAYERS + "0.self_attention.core_attention.softmax_offset", 0),
        "bias of a router": _filled(LAYERS + "1.mlp.router.bias", 0),
        "bias of gate and up of an expert": _halves(LAYERS + f"1.{EXPERTS}.2.linear_fc1.bias"),
        "bias after an expert": _filled(LAYERS + f"1.{EXPERTS}.2.linear_fc2.bias", 0),
    },
    "nemotron": {
        "decay": _filled(LAYERS + "0.mixer.A_log", 0),
        "one step bias": lambda m: m.get_parameter(LAYERS + "2.mixer.dt_bias")[0].add_(0.1),
        "convolution bias": _filled(LAYERS + "0.mixer.conv1d.bias", 0),
        "convolution reversed": _flipped(LAYERS + "0.mixer.conv1d.weight"),
        "D": _filled(LAYERS + "2.mixer.D", 0),
        "gated norm": _filled(LAYERS + "0.mixer.norm.weight", 1),
        "MLP norm": _filled(LAYERS + "3.pre_mlp_layernorm.weight", 1),
        "gate and input": _swapped(LAYERS + "0.mixer.in_proj.weight", slice(32), slice(32, 64)),
    },
    "nemotron MoE": {
        "expert bias": lambda m: m.get_buffer(LAYERS + "1.mlp.router.expert_bias").zero_(),
        "scaling factor": lambda m: setattr(
            m.get_submodule(LAYERS + "3.mlp.router").config, "moe_router_topk_scaling_factor", 2.4
        ),
        "two experts": _exchanged(
            LAYERS + f"1.{EXPERTS}.0.linear_fc1.weight", LAYERS + f"1.{EXPERTS}.5.linear_fc1.weight"
        ),
        "no shared experts": _filled(LAYERS + "3.mlp.shared_experts.linear_fc2.weight", 0),
    },
    "nemotron MoE, groups": {
        "all groups open": lambda m: setattr(
            m.get_submodule(LAYERS + "0.mlp.router").config, "moe_router_group_topk", None
        ),
    },
    "nemotron MoE, latent, one expert a token": {
        "latent input": lambda m: m.get_parameter(LAYERS + "1.mlp.fc1_latent_proj.weight")[0].zero_(),
        "latent output": lambda m: m.get_parameter(LAYERS + "1.mlp.fc2_latent_proj.weight")[:, 0].zero_(),
    },
    "mamba, tied": {
        "decay": _filled(LAYERS + "0.mixer.A_log", 0),
        "step bias": lambda m: m.get_parameter(LAYERS + "0.mixer.dt_proj.bias")[0].add_(0.3),
        "step weight": _filled(LAYERS + "0.mixer.dt_proj.weight", 0),
        "D": _filled(LAYERS + "0.mixer.D", 0),
        "gate and input": _halves(LAYERS + "0.mixer.in_proj.weight"),
    },
    "falcon_mamba": {
        "norm of dt left out": lambda m: setattr(m.decoder.layers[0].mixer, "dt_layernorm", nn.Identity())
    },
    "jamba": {
        "norm of B": _filled(LAYERS + "0.mixer.b_layernorm.weight", 1),
        "norm of C": _filled(LAYERS + "0.mixer.c_layernorm.weight", 1),
    },
    "qwen3_next moe": {  # rows q [16], k [16], v [48], gate [48], beta [4], alpha [4]
        "q and k": _swapped(LAYERS + "0.mixer.in_proj.weight", slice(16), slice(16, 32)),
        "v and gate": _swapped(LAYERS + "0.mixer.in_proj.weight", slice(32, 80), slice(80, 128)),
        "beta and alpha": _swapped(LAYERS + "0.mixer.in_proj.weight", slice(128, 132), slice(132, 136)),
        "two value heads": _swapped(LAYERS + "0.mixer.in_proj.weight", slice(32, 44), slice(56, 68)),
        "norm after the gated delta net": _filled(LAYERS + "0.mixer.out_norm.weight", 0),
        "query and gate of attention": _swapped(LAYERS + f"6.{QKV}", slice(32), slice(32, 64)),
        "norm of queries": _filled(LAYERS + "6.self_attention.q_layernorm.weight", 0),
        "gate of shared experts": _filled(LAYERS + "1.mlp.shared_experts.gate_weight", 0),
    },
    "mamba2": {"groups of heads": _rolled(LAYERS + "0.mixer.A_log", 4)},
    "granite": {"gate and up in one matrix": _rolled(LAYERS + "1.mlp.linear_fc1.weight", 24)},
    "lfm2, tied": {
        "B and x": _rolled(LAYERS + "0.mixer.in_proj.weight", 32),
        "convolution": _rolled(LAYERS + "4.mixer.conv1d.weight"),
        "norm of queries": _filled(LAYERS + "2.self_attention.q_layernorm.weight", 1),
    },
    "lfm2 moe": {"bias of experts": lambda m: m.get_buffer(LAYERS + "3.mlp.router.expert_bias").mul_(-3)},
    "falcon_h1": {
        "attention beside a mixer": _filled(LAYERS + "2.self_attention.linear_proj.weight", 0),
        "a mixer beside attention": _filled(LAYERS + "2.mixer.out_proj.weight", 0),
    },
    "falcon_h1, norm first": {"norm before the gate": _filled(LAYERS + "2.mixer.norm.weight", 1)},
    "olmo": {
        "convolution of keys": _rolled(LAYERS + "0.mixer.conv1d.weight", 16),
        "norm after attention": _filled(LAYERS + "2.self_attention.output_norm.norm.weight", 1),
        "norm after an MLP": _filled(LAYERS + "3.mlp.output_norm.norm.weight", 1),
        "norm of keys of all heads": _rolled(LAYERS + "2.self_attention.k_layernorm.weight", 8),
    },
}
ONE_BY_ONE = [(shape, words) for shape, controls in CONTROLS.items() for words in controls]


@pytest.mark.parametrize(("name", "control"), long_except(ONE_BY_ONE[:2], ONE_BY_ONE))
@torch.no_grad()
def test_comparison_sees_one_wrong_tensor(name: str, control: str, oracles) -> None:
    """Each error is at least ten times the tolerance."""
    theirs, directory = oracles(name)
    ours = load_hf(directory).model
    CONTROLS[name][control](ours)
    assert excess(ours, theirs) > 10


FALCON = "falcon_h1"
PARTS = (1.125, 1.375, 1.5, 1.0, 0.875)  # of that model, for z, x, B, C and dt
SETTINGS = [
    *(("llama", {name: value}) for name, value in {"rotary_base": 11000, "rotary_percent": 0.5}.items()),
    ("llama, tied", {"norm_epsilon": 1e-3}),
    ("llama, scaled, wide heads, MQA", {"use_rope_scaling": False}),
    ("qwen3_next", {"apply_layernorm_1p": False}),
    ("olmo", {"linear_allow_neg_eigval": False}),
    ("olmo", {"linear_norm_epsilon": 1e-2}),
    ("olmo", {"position_embedding_type": "none"}),
    (QWEN, {"rotary_percent": 0.25}),
    *((FALCON, {name: 0.9}) for name in MULTIPLIERS),
    *((FALCON, {"mamba_multipliers": (*PARTS[:i], 0.95, *PARTS[i + 1 :])}) for i in range(5)),
    ("granite", {"embedding_multiplier": 2.9}),
    ("granite", {"residual_multiplier": 0.69}),
    ("granite", {"softmax_scale": 0.19}),
    ("granite", {"logits_multiplier": 0.41}),
    ("llama, biases, yarn", {"yarn_rotary_scaling_factor": 3.0}),
    ("llama, biases, yarn", {"yarn_mscale": 0.0}),
    ("llama, biases, yarn", {"yarn_original_max_position_embeddings": 512}),
    ("qwen2, window, yarn, tied", {"yarn_correction_range_round_to_int": True}),
    ("qwen2, window, yarn, tied", {"yarn_beta_slow": 1.0}),
    ("qwen3 moe, sums of weights, MLPs in some layers", {"moe_router_pre_softmax": False}),
    ("mixtral", {"moe_router_pre_softmax": True}),
    ("mistral, window", {"attention_window": 41}),
    (GPT_OSS, {"attention_window": 101}),
    (GPT_OSS, {"activation_func_clamp_value": 0.7}),
    (GPT_OSS, {"glu_linear_offset": 0.9}),
]


@pytest.mark.long
@pytest.mark.parametrize(("name", "override"), SETTINGS, ids=str)
def test_comparison_sees_one_wrong_setting(name: str, override: dict, oracles) -> None:
    """Flags win over the checkpoint; these have no weights that could contradict them."""
    theirs, directory = oracles(name)
    config = load_hf(directory).config
    assert {setting: getattr(config, setting) for setting in override} != override
    assert excess(load_hf(directory, override).model, theirs, 300) > 10


def test_the_parts_of_a_projection(oracles) -> None:
    """The settings above have the effect that the file states: the input's factor times each part's."""
    assert load_hf(oracles(FALCON)[1]).config.mamba_multipliers == pytest.approx(PARTS)
