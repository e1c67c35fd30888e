"""Imported checkpoints of every family compute what transformers computes, cold and warm; and this can fail."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from megatron_ext.config.model_fields import MULTIPLIERS
from tests.on_request import long_except
from tests.priority import TestPriority
from tests.unit_tests.models.huggingface import hybrid_oracle
from tests.unit_tests.models.huggingface import nemotron_h_oracle as oracle
from tests.unit_tests.models.huggingface.families import EVERY_SHAPE, FAMILIES, engine_excess, excess, load_hf
from tests.unit_tests.support.hybrid_caching import HybridDriver

pytestmark = pytest.mark.priority(TestPriority.HIGH)

BLOCK = 16
LEAST_MARGIN = 1e-5
IN_CHUNKS = {"max_tokens": 48, "max_requests": 8}


# Of each recurrent family the last shape: what is special is in it.
LAST = {
    **{shape.family: ("hybrids", shape.name) for shape in hybrid_oracle.SHAPES},
    **{shape.family: ("mambas", shape.name) for shape in FAMILIES["mambas"].module.SHAPES},
    "qwen3_next": ("qwens", FAMILIES["qwens"].names[-1]),
    "nemotron_h": ("oracles", "mha"),
}


@pytest.fixture
def made(request: pytest.FixtureRequest) -> Callable:
    """A function from fixture and shape to transformers' model and the directory that it saved itself to."""
    return lambda fixture, name: request.getfixturevalue(fixture)(name)


@pytest.mark.parametrize(("fixture", "name"), long_except([*LAST.values(), *EVERY_SHAPE[::2]], EVERY_SHAPE))
def test_logits_equal(fixture: str, name: str, made) -> None:
    """FA-1, M1-1, LA-2: full forwards, fp32; the greedy token of each position follows."""
    family = FAMILIES[fixture]
    theirs, directory = made(fixture, name)
    ours = load_hf(directory).model
    has_experts = any("experts" in parameter for parameter, _ in theirs.named_parameters())
    for length in family.lengths:
        tokens = oracle.prompt(length, seed=length)
        expected = oracle.their_logits(theirs, tokens)
        assert expected.std() > 0.3, "flat logits would make this test blind"
        if has_experts:
            margin = family.module.routing_margin(theirs, tokens)
            assert margin > LEAST_MARGIN, "rounding alone may choose other experts"
        assert oracle.largest_excess(oracle.our_logits(ours, tokens), expected) <= 1, length


# Families with every kind of state, mixers beside attention and experts among them.
KINDS = ("falcon_h1", "lfm2_moe", "jamba", "qwen3_next")
RECURRENT = [
    *((fixture, name) for fixture, name in EVERY_SHAPE if fixture in ("hybrids", "mambas", "qwens")),
    *(("oracles", shape.name) for shape in oracle.SHAPES if "M" in shape.pattern and shape.name != "MoE"),
]


def play(driver: HybridDriver) -> list[int]:
    """Serve one prompt twice, with another end, and with the next chat turn; return the skipped tokens of each."""
    prompt = oracle.prompt(100, seed=1)
    driver.sight(0, prompt, num_tokens_to_generate=13)
    answer = driver.records[0].generated_tokens
    driver.add(1, prompt)
    driver.add(2, [*prompt[:70], *oracle.prompt(9, seed=2)])
    driver.add(3, [*prompt, *answer, *oracle.prompt(5, seed=3)])
    driver.run()
    driver.sight(4, [*prompt[:70], *oracle.prompt(12, seed=4)])
    return driver.skipped(*range(5))


@pytest.mark.parametrize("mode", long_except(["kernel"], ["kernel", "align"]))
@pytest.mark.parametrize(("fixture", "name"), long_except([LAST[family] for family in KINDS], RECURRENT))
def test_warm_starts_equal_transformers(fixture: str, name: str, mode: str, made) -> None:
    """FA-1, M1-1, LA-1, LA-2, HY-3, HY-4: chunked prefill and cached beginnings, beside full forwards."""
    theirs, directory = made(fixture, name)
    loaded = load_hf(directory)
    driver = HybridDriver(loaded.model, loaded.config, block_size=BLOCK, mode=mode, **IN_CHUNKS)
    leaves_more = mode == "align"  # at 48 tokens, where the first step ends
    assert play(driver) == [0, 96, 48 if leaves_more else 64, 112, 64]  # 64: an opportunistic checkpoint
    for request_id in range(5):
        assert engine_excess(driver, request_id, theirs) <= 1


def test_warm_starts_of_whole_prompts(oracles) -> None:
    """HY-3, HY-4, EX-1: without chunked prefill."""
    theirs, directory = oracles("mha")
    loaded = load_hf(directory)
    driver = HybridDriver(loaded.model, loaded.config, block_size=BLOCK, max_tokens=1024, enable_chunked_prefill=False)
    assert play(driver) == [0, 96, 64, 112, 64]
    for request_id in range(5):
        assert engine_excess(driver, request_id, theirs) <= 1


# Negative controls

STATES = [
    (*shape, which) for shape in LAST.values() for which in ("conv", "ssm") if "lfm2" not in shape[1] or which == "conv"
]


@pytest.mark.parametrize(("fixture", "name", "which"), long_except(STATES[:1], STATES))
def test_the_comparison_sees_a_lost_state(fixture: str, name: str, which: str, made) -> None:
    """The comparison fails if one layer of all snapshots is zero."""
    theirs, directory = made(fixture, name)
    loaded = load_hf(directory)
    driver = HybridDriver(loaded.model, loaded.config, block_size=BLOCK, max_requests=8)
    driver.sight(0, oracle.prompt(100, seed=1))
    getattr(driver.context.snapshots, which)[1] = 0.0
    assert driver.sight(1, oracle.prompt(100, seed=1)) == 96
    assert engine_excess(driver, 0, theirs) <= 1
    assert engine_excess(driver, 1, theirs) > 10


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


def _set(module: str, name: str, value: object) -> Spoil:
    return lambda m: setattr(m.get_submodule(module), name, value)


QKV = "self_attention.linear_qkv.weight"
EXPERTS = "mlp.experts.local_experts"
YARN = "llama, biases of attention, yarn"
GPT_OSS = "gpt-oss, listed windows, low limit"
QWEN = "qwen3_5, as many heads, other window, base and share, yarn"
LATENT = "MoE, latent, one expert a token"
GRANITE = "granite, experts, rotary, tied"
CONTROLS: dict[tuple[str, str], dict[str, Spoil]] = {
    ("llamas", "mha"): {
        "gate and up": _swapped(LAYERS + "1.mlp.linear_fc1.weight", slice(40), slice(40, 80)),
        "query and key of a head": _swapped(LAYERS + f"2.{QKV}", slice(8), slice(8, 16)),
        "key and value of a head": _swapped(LAYERS + f"0.{QKV}", slice(8, 16), slice(16, 24)),
        "halves of a query head": _swapped(LAYERS + f"0.{QKV}", slice(4), slice(4, 8)),
        "attention norm": _filled(LAYERS + "2.input_layernorm.weight", 1),
        "final norm": _filled("decoder.final_norm.weight", 1),
        "output": _swapped("output_layer.weight", slice(1), slice(1, 2)),
    },
    ("oracles", "mha"): {
        "query and key": _swapped(LAYERS + f"1.{QKV}", slice(8), slice(8, 16)),
        "decay": _filled(LAYERS + "0.mixer.A_log", 0),
        "one step bias": lambda m: m.get_parameter(LAYERS + "2.mixer.dt_bias")[0].add_(0.1),
        "convolution bias": _filled(LAYERS + "0.mixer.conv1d.bias", 0),
        "convolution reversed": _flipped(LAYERS + "0.mixer.conv1d.weight"),
        "D": _filled(LAYERS + "2.mixer.D", 0),
        "gated norm": _filled(LAYERS + "0.mixer.norm.weight", 1),
        "MLP norm": _filled(LAYERS + "3.pre_mlp_layernorm.weight", 1),
        "gate and input": _swapped(LAYERS + "0.mixer.in_proj.weight", slice(32), slice(32, 64)),
    },
    ("oracles", "MoE"): {
        "expert bias": lambda m: m.get_buffer(LAYERS + "1.mlp.router.expert_bias").zero_(),
        "scaling factor": lambda m: setattr(
            m.get_submodule(LAYERS + "3.mlp.router").config, "moe_router_topk_scaling_factor", 2.4
        ),
        "two experts": _exchanged(
            LAYERS + f"1.{EXPERTS}.0.linear_fc1.weight", LAYERS + f"1.{EXPERTS}.5.linear_fc1.weight"
        ),
        "no shared experts": _filled(LAYERS + "3.mlp.shared_experts.linear_fc2.weight", 0),
        "one expert more": _set(LAYERS + "1.mlp.router", "topk", 3),
        "softmax": _set(LAYERS + "1.mlp.router", "score_function", "softmax"),
    },
    ("oracles", "MoE, groups"): {
        "all groups open": lambda m: setattr(
            m.get_submodule(LAYERS + "0.mlp.router").config, "moe_router_group_topk", None
        ),
    },
    ("oracles", LATENT): {
        "latent input": lambda m: m.get_parameter(LAYERS + "1.mlp.fc1_latent_proj.weight")[0].zero_(),
        "latent output": lambda m: m.get_parameter(LAYERS + "1.mlp.fc2_latent_proj.weight")[:, 0].zero_(),
    },
    ("mambas", "mamba, tied"): {
        "decay": _filled(LAYERS + "0.mixer.A_log", 0),
        "step bias": lambda m: m.get_parameter(LAYERS + "0.mixer.dt_proj.bias")[0].add_(0.3),
        "step weight": _filled(LAYERS + "0.mixer.dt_proj.weight", 0),
        "D": _filled(LAYERS + "0.mixer.D", 0),
        "convolution reversed": _flipped(LAYERS + "0.mixer.conv1d.weight"),
        "gate and input": _halves(LAYERS + "0.mixer.in_proj.weight"),
    },
    ("mambas", "falcon"): {"norm of dt left out": _set(LAYERS + "0.mixer", "dt_layernorm", nn.Identity())},
    ("mambas", "jamba"): {
        "norm of B": _filled(LAYERS + "0.mixer.b_layernorm.weight", 1),
        "norm of C": _filled(LAYERS + "0.mixer.c_layernorm.weight", 1),
    },
    ("mambas", "jamba, experts"): {"two experts": _halves(LAYERS + "1.mlp.router.weight")},
    ("qwens", "experts"): {  # rows q [16], k [16], v [48], gate [48], beta [4], alpha [4]
        "q and k": _swapped(LAYERS + "0.mixer.in_proj.weight", slice(16), slice(16, 32)),
        "v and gate": _swapped(LAYERS + "0.mixer.in_proj.weight", slice(32, 80), slice(80, 128)),
        "beta and alpha": _swapped(LAYERS + "0.mixer.in_proj.weight", slice(128, 132), slice(132, 136)),
        "two value heads": _swapped(LAYERS + "0.mixer.in_proj.weight", slice(32, 44), slice(56, 68)),
        "norm after the gated delta net": _filled(LAYERS + "0.mixer.out_norm.weight", 0),
        "norm before it": _filled(LAYERS + "0.norm.weight", 0),
        "query and gate of attention": _swapped(LAYERS + f"6.{QKV}", slice(32), slice(32, 64)),
        "norm of queries": _filled(LAYERS + "6.self_attention.q_layernorm.weight", 0),
        "norm of keys": _filled(LAYERS + "6.self_attention.k_layernorm.weight", 0),
        "gate of shared experts": _filled(LAYERS + "1.mlp.shared_experts.gate_weight", 0),
        "two experts": _swapped(LAYERS + "1.mlp.router.weight", slice(1), slice(1, 2)),
        "gate and up of an expert": _swapped(LAYERS + f"1.{EXPERTS}.0.linear_fc1.weight", slice(24), slice(24, 48)),
    },
    ("hybrids", "mamba2"): {
        "groups of heads": _rolled(LAYERS + "0.mixer.A_log", 4),
        "gated norm": _filled(LAYERS + "1.mixer.norm.weight", 1),
    },
    ("hybrids", "bamba"): {
        "query and key": _rolled(LAYERS + f"2.{QKV}", 8),
        "gate and up": _rolled(LAYERS + "1.mlp.linear_fc1.weight", 40),
    },
    ("hybrids", "granite, dense"): {"gate and up in one matrix": _rolled(LAYERS + "1.mlp.linear_fc1.weight", 24)},
    ("hybrids", "lfm2, tied"): {
        "B and x": _rolled(LAYERS + "0.mixer.in_proj.weight", 32),
        "convolution": _rolled(LAYERS + "4.mixer.conv1d.weight"),
        "norm of queries": _filled(LAYERS + "2.self_attention.q_layernorm.weight", 1),
    },
    ("hybrids", "falcon_h1, no norm"): {
        "attention beside a mixer": _filled(LAYERS + "2.self_attention.linear_proj.weight", 0),
        "a mixer beside attention": _filled(LAYERS + "2.mixer.out_proj.weight", 0),
    },
    ("hybrids", "falcon_h1, norm first"): {"norm before the gate": _filled(LAYERS + "2.mixer.norm.weight", 1)},
    ("hybrids", QWEN): {
        "keys and values": _rolled(LAYERS + "0.mixer.in_proj.weight", 24),
        "beta and alpha": _swapped(LAYERS + "0.mixer.in_proj.weight", slice(-6, -3), slice(-3, None)),
        "norm after a gated delta net": _filled(LAYERS + "0.mixer.out_norm.weight", 0),
    },
    ("hybrids", "lfm2 moe"): {
        "bias of experts": lambda m: m.get_buffer(LAYERS + "3.mlp.router.expert_bias").mul_(-3),
    },
    ("hybrids", "olmo"): {
        "convolution of keys": _rolled(LAYERS + "0.mixer.conv1d.weight", 16),
        "norm after attention": _filled(LAYERS + "2.self_attention.output_norm.norm.weight", 1),
        "norm after an MLP": _filled(LAYERS + "3.mlp.output_norm.norm.weight", 1),
        "norm of keys of all heads": _rolled(LAYERS + "2.self_attention.k_layernorm.weight", 8),
    },
    ("hybrids", GRANITE): {
        "two experts": _rolled(LAYERS + "1.mlp.router.weight"),
        "the shared expert": _filled(LAYERS + "1.mlp.shared_experts.linear_fc2.weight", 0),
    },
    ("denses", "qwen2"): {
        "bias of queries, keys, values": _filled(LAYERS + "0.self_attention.linear_qkv.bias", 0),
        "queries and keys of the bias": _halves(LAYERS + "0.self_attention.linear_qkv.bias"),
    },
    ("denses", YARN): {"bias of attention's output": _filled(LAYERS + "2.self_attention.linear_proj.bias", 0)},
    ("denses", "llama, biases of MLPs, tied"): {
        "bias inside an MLP": _halves(LAYERS + "1.mlp.linear_fc1.bias"),
        "bias of an MLP's output": _filled(LAYERS + "3.mlp.linear_fc2.bias", 0),
    },
    ("denses", "qwen3"): {"norm of queries": _filled(LAYERS + "0.self_attention.q_layernorm.weight", 0)},
    ("denses", "qwen3 moe"): {
        "norm of keys": _filled(LAYERS + "2.self_attention.k_layernorm.weight", 0),
        "an expert": _filled(LAYERS + f"1.{EXPERTS}.2.linear_fc1.weight", 0),
    },
    ("denses", "mixtral"): {"gate and up of an expert": _halves(LAYERS + f"1.{EXPERTS}.2.linear_fc1.weight")},
    ("denses", GPT_OSS): {
        "sinks": _filled(LAYERS + "0.self_attention.core_attention.softmax_offset", 0),
        "bias of a router": _filled(LAYERS + "1.mlp.router.bias", 0),
        "bias of gate and up of an expert": _halves(LAYERS + f"1.{EXPERTS}.2.linear_fc1.bias"),
        "bias after an expert": _filled(LAYERS + f"1.{EXPERTS}.2.linear_fc2.bias", 0),
    },
    ("denses", "qwen3 moe, one expert a token"): {"router": _halves(LAYERS + "1.mlp.router.weight")},
}
ONE_BY_ONE = [(*shape, words) for shape, controls in CONTROLS.items() for words in controls]


@pytest.mark.long
@pytest.mark.parametrize(("fixture", "name", "control"), ONE_BY_ONE)
@torch.no_grad()
def test_comparison_sees_one_wrong_tensor(fixture: str, name: str, control: str, made) -> None:
    """Each error is at least ten times the tolerance."""
    theirs, directory = made(fixture, name)
    ours = load_hf(directory).model
    CONTROLS[fixture, name][control](ours)
    assert excess(ours, theirs) > 10


FALCON = "falcon_h1, no norm"
PARTS = (1.125, 1.375, 1.5, 1.0, 0.875)  # of that model, for z, x, B, C and dt
SETTINGS = [
    *(
        ("llamas", "mha", override)
        for override in (
            {"rotary_base": 11000},
            {"rotary_percent": 0.5},
            {"position_embedding_type": "none"},
            {"norm_epsilon": 1e-3},
        )
    ),
    *(
        ("qwens", "dense", override)
        for override in (
            {"rotary_base": 500},
            {"rotary_percent": 0.5},
            {"norm_epsilon": 1e-2},
            {"apply_layernorm_1p": False},
        )
    ),
    ("hybrids", "olmo", {"linear_allow_neg_eigval": False}),
    ("hybrids", "olmo", {"linear_norm_epsilon": 1e-2}),
    ("hybrids", "olmo", {"position_embedding_type": "none"}),
    ("hybrids", QWEN, {"rotary_percent": 0.25}),
    *(("hybrids", FALCON, {name: 0.9}) for name in MULTIPLIERS),
    *(("hybrids", FALCON, {"mamba_multipliers": (*PARTS[:i], 0.95, *PARTS[i + 1 :])}) for i in range(5)),
    ("hybrids", "bamba", {"rotary_percent": 1.0}),
    ("hybrids", "granite, dense", {"embedding_multiplier": 2.9}),
    ("hybrids", "granite, dense", {"residual_multiplier": 0.69}),
    ("hybrids", "granite, dense", {"softmax_scale": 0.19}),
    ("hybrids", "granite, dense", {"logits_multiplier": 0.41}),
    ("hybrids", "granite, dense", {"position_embedding_type": "rope"}),
    ("denses", YARN, {"yarn_rotary_scaling_factor": None}),
    ("denses", YARN, {"yarn_rotary_scaling_factor": 3.0}),
    ("denses", YARN, {"yarn_mscale": 0.0}),
    ("denses", YARN, {"yarn_original_max_position_embeddings": 512}),
    ("denses", "qwen2, window, yarn, tied", {"yarn_correction_range_round_to_int": True}),
    ("denses", "qwen2, window, yarn, tied", {"yarn_beta_slow": 1.0}),
    ("denses", "qwen3 moe, sums of weights, MLPs in some layers", {"moe_router_pre_softmax": False}),
    ("denses", "mixtral", {"moe_router_pre_softmax": True}),
    ("denses", "qwen3", {"rotary_base": 11000}),
    ("denses", "mistral", {"norm_epsilon": 1e-3}),
    ("denses", "mistral, window", {"attention_window": 41}),
    ("denses", GPT_OSS, {"attention_window": 101}),
    ("denses", GPT_OSS, {"activation_func_clamp_value": 0.7}),
    ("denses", GPT_OSS, {"glu_linear_offset": 0.9}),
]


@pytest.mark.long
@pytest.mark.parametrize(("fixture", "name", "override"), SETTINGS, ids=str)
def test_comparison_sees_one_wrong_setting(fixture: str, name: str, override: dict, made) -> None:
    """Flags win over the checkpoint; these have no weights that could contradict them."""
    theirs, directory = made(fixture, name)
    config = load_hf(directory).config
    assert {setting: getattr(config, setting) for setting in override} != override
    assert excess(load_hf(directory, override).model, theirs, 300) > 10


def test_the_parts_of_a_projection(hybrids) -> None:
    """The settings above have the effect that the file states: the input's factor times each part's."""
    assert load_hf(hybrids(FALCON)[1]).config.mamba_multipliers == pytest.approx(PARTS)
