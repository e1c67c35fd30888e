"""Imported checkpoints of recurrent and hybrid families compute what transformers computes, cache off and on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from megatron_ext.config import BatchingConfig, CacheConfig, RequestParams, SourceConfig
from megatron_ext.config.model_fields import MULTIPLIERS
from megatron_ext.mcore.assemble import build_engine
from megatron_ext.models.load import LoadedModel, load_model, save_model
from megatron_ext.offline.comparison import FP32_TOLERANCE, MAX_TOLERANCE, P95_TOLERANCE, compare
from megatron_ext.scheduling.record import RequestRecord
from tests.on_request import long_except
from tests.priority import TestPriority
from tests.unit_tests.models.huggingface import hybrid_oracle
from tests.unit_tests.models.huggingface import nemotron_h_oracle as oracle
from tests.unit_tests.models.huggingface.test_snapshots import excess as engine_excess
from tests.unit_tests.models.huggingface.test_snapshots import play
from tests.unit_tests.support.hybrid_caching import HybridDriver

pytestmark = pytest.mark.priority(TestPriority.HIGH)

LENGTHS = (1, 3, 65, 130)
BLOCK = 16
NAMES = [shape.name for shape in hybrid_oracle.SHAPES]
# Of each family the last shape: what is special is in it.
LAST = list({shape.family: shape.name for shape in hybrid_oracle.SHAPES}.values())
LEAST_MARGIN = 1e-5
CPU = torch.device("cpu")


@functools.cache
def load_hf(directory: Path, bf16: bool = False) -> LoadedModel:
    """Shared by tests, which do not change it."""
    return load_model(SourceConfig(load_hf=str(directory), bf16=bf16), {}, device=CPU)


def excess(ours: nn.Module, theirs: PreTrainedModel, length: int = 129) -> float:
    """Largest error of a prompt's logits in units of the tolerance: at most 1 is equal."""
    tokens = oracle.prompt(length, seed=length)
    return oracle.largest_excess(oracle.our_logits(ours, tokens), oracle.their_logits(theirs, tokens))


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_greedy_tokens_equal(name: str, hybrids) -> None:
    """FA-1: full forwards and greedy continuations, fp32."""
    theirs, directory = hybrids(name)
    ours = load_hf(directory).model
    for length in LENGTHS:
        tokens = oracle.prompt(length, seed=length)
        assert oracle.their_logits(theirs, tokens).std() > 0.3, "flat logits would make this test blind"
        assert hybrid_oracle.routing_margin(theirs, tokens) > LEAST_MARGIN, "rounding alone may choose other experts"
        assert excess(ours, theirs, length) <= 1, length
    tokens = oracle.prompt(20, seed=20)
    generated = oracle.greedy(lambda t: oracle.their_logits(theirs, t), tokens, 10)
    assert len(set(generated)) > 4, "a loop would make this test blind"
    assert oracle.greedy(lambda t: oracle.our_logits(ours, t), tokens, 10) == generated


@pytest.mark.parametrize("mode", long_except(["kernel"], ["kernel", "align"]))
@pytest.mark.parametrize("name", long_except(LAST, NAMES))
def test_warm_starts_equal_transformers(name: str, mode: str, hybrids) -> None:
    """FA-1, HY-3, HY-4, LA-1: chunked prefill and cached beginnings, beside full forwards of transformers."""
    theirs, directory = hybrids(name)
    loaded = load_hf(directory)
    driver = HybridDriver(loaded.model, loaded.config, block_size=BLOCK, max_tokens=48, max_requests=8, mode=mode)
    leaves_more = mode == "align"  # at 48 tokens, where the first step ends
    assert play(driver) == [0, 96, 48 if leaves_more else 64, 112, 64]  # 64: an opportunistic checkpoint
    for request_id in range(5):
        assert engine_excess(driver, request_id, theirs) <= 1


@pytest.mark.parametrize("mode", long_except(["kernel"], ["kernel", "align"]))
@pytest.mark.parametrize("name", long_except(LAST[:1], LAST))
def test_every_boundary(name: str, mode: str, hybrids) -> None:
    """FA-1, HY-3: a snapshot at each boundary of one prompt, and a sighting that resumes from each of them."""
    theirs, directory = hybrids(name)
    loaded, prompt = load_hf(directory), oracle.prompt(4 * BLOCK + 3, seed=5)
    driver = HybridDriver(loaded.model, loaded.config, block_size=BLOCK, max_tokens=400, max_requests=8, mode=mode)
    boundaries = range(BLOCK, len(prompt), BLOCK)
    for number, end in enumerate(boundaries):
        driver.sight(number, [*prompt[:end], 5], num_tokens_to_generate=1)
    assert driver.snapshots_of(prompt) == list(boundaries)
    for number, end in enumerate(boundaries):
        assert driver.sight(10 + number, [*prompt[: end + 2], *oracle.prompt(5, seed=number)]) == end
        assert engine_excess(driver, 10 + number, theirs) <= 1


@pytest.mark.parametrize("name", long_except(LAST[:1], LAST))
def test_under_pressure(name: str, hybrids) -> None:
    """FA-1, HY-5: too few blocks for all, one slot: requests are preempted and resume; tokens are those without."""
    theirs, directory = hybrids(name)
    loaded = load_hf(directory)
    driver = HybridDriver(
        loaded.model, loaded.config, block_size=BLOCK, block_count=9, slots=1, max_tokens=40, max_requests=4
    )
    prompts = [[*oracle.prompt(37, seed=1), *oracle.prompt(9 * number, seed=number)] for number in range(4)]
    for number, prompt in enumerate(prompts):
        driver.add(number, prompt, num_tokens_to_generate=20)
    driver.run()
    use = driver.scheduler.cache.use()
    assert use.blocks_evicted or any(record.recomputed_token_count for record in driver.records.values())
    for number, prompt in enumerate(prompts):
        assert engine_excess(driver, number, theirs) <= 1, len(prompt)


def serve(loaded: LoadedModel, prompts: Sequence[Sequence[int]], *, is_cached: bool) -> list[RequestRecord]:
    """The first one alone, which leaves its blocks and states, then the others together."""
    batching = BatchingConfig(block_size=BLOCK, block_count=200, max_requests=8, max_tokens=64)
    cache = CacheConfig(enable_prefix_caching=is_cached, snapshot_slots=20 if is_cached else None)
    engine = build_engine(loaded.model, loaded.config, loaded.tokenizer, batching, cache, dtype=loaded.dtype)
    wanted = RequestParams(
        num_tokens_to_generate=10, return_log_probs=True, skip_prompt_log_probs=True, top_n_logprobs=2
    )
    return [record for batch in (prompts[:1], prompts[1:]) for record in engine.generate(batch, wanted)]


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", long_except(LAST[:1], LAST))
def test_cache_on_beside_off(name: str, bf16: bool, hybrids) -> None:
    """FA-1, HY-14: greedy tokens are equal in fp32, and within the documented limits in 16 bits."""
    loaded = load_hf(hybrids(name)[1], bf16)
    prompt = oracle.prompt(70, seed=1)
    prompts = [prompt, *([*prompt[: 64 + number], *oracle.prompt(7, seed=number)] for number in range(5))]
    off, on = (serve(loaded, prompts, is_cached=is_cached) for is_cached in (False, True))
    assert sum(record.skipped_prefill_token_count for record in on) == 5 * 64
    compared = compare(off, on)
    gaps = torch.tensor([gap for one in compared for gap in one.log_probs])
    assert len(gaps) > 30
    if not bf16:
        assert [one.first_token for one in compared] == [None] * 6
        assert gaps.max() <= FP32_TOLERANCE
    assert gaps.quantile(0.95) <= P95_TOLERANCE
    assert gaps.max() <= MAX_TOLERANCE


@pytest.mark.parametrize("name", LAST)
def test_saved_and_loaded(name: str, hybrids, tmp_path: Path) -> None:
    """FA-1: --load-hf, --save, --load: the same configuration and the same logits."""
    imported, tokens = load_hf(hybrids(name)[1]), oracle.prompt(65, seed=0)
    save_model(tmp_path / "own", imported)
    loaded = load_model(SourceConfig(load=str(tmp_path / "own")), {}, device=CPU)
    assert loaded.config == imported.config
    assert torch.equal(oracle.our_logits(loaded.model, tokens), oracle.our_logits(imported.model, tokens))


# Negative controls

STATES = [(name, which) for name in LAST for which in ("conv", "ssm") if which == "conv" or "lfm2" not in name]


@pytest.mark.parametrize(("name", "which"), long_except(STATES[:1], STATES))
def test_the_comparison_sees_a_lost_state(name: str, which: str, hybrids) -> None:
    """The comparison fails if one layer of all snapshots is zero."""
    theirs, directory = hybrids(name)
    loaded = load_hf(directory)
    driver = HybridDriver(loaded.model, loaded.config, block_size=BLOCK, max_requests=8)
    driver.sight(0, oracle.prompt(100, seed=1))
    getattr(driver.context.snapshots, which)[1] = 0.0
    assert driver.sight(1, oracle.prompt(100, seed=1)) == 96
    assert engine_excess(driver, 0, theirs) <= 1
    assert engine_excess(driver, 1, theirs) > 10


def _rolled(name: str, by: int = 1) -> Callable[[nn.Module], object]:
    """The rows of a tensor in another order."""
    return lambda m: m.get_parameter(name).copy_(m.get_parameter(name).roll(by, 0))


def _filled(name: str, value: float) -> Callable[[nn.Module], object]:
    return lambda m: m.get_parameter(name).fill_(value)


def _rolled_rows(model: nn.Module, name: str, rows: slice, by: int) -> None:
    part = model.get_parameter(name)[rows]
    part.copy_(part.roll(by, 0))


LAYERS = "decoder.layers."
QWEN = "qwen3_5, as many heads, other window, base and share, yarn"
CONTROLS = {
    "groups of heads": ("mamba2", _rolled(LAYERS + "0.mixer.A_log", 4)),
    "gated norm": ("mamba2", _filled(LAYERS + "1.mixer.norm.weight", 1.0)),
    "query and key": ("bamba", _rolled(LAYERS + "2.self_attention.linear_qkv.weight", 8)),
    "gate and up": ("bamba", _rolled(LAYERS + "1.mlp.linear_fc1.weight", 40)),
    "gate and up in one matrix": ("granite, dense", _rolled(LAYERS + "1.mlp.linear_fc1.weight", 24)),
    "B and x": ("lfm2, tied", _rolled(LAYERS + "0.mixer.in_proj.weight", 32)),
    "convolution": ("lfm2, tied", _rolled(LAYERS + "4.mixer.conv1d.weight")),
    "norm of queries": ("lfm2, tied", _filled(LAYERS + "2.self_attention.q_layernorm.weight", 1.0)),
    "attention beside a mixer": (
        "falcon_h1, no norm",
        _filled(LAYERS + "2.self_attention.linear_proj.weight", 0.0),
    ),
    "a mixer beside attention": ("falcon_h1, no norm", _filled(LAYERS + "2.mixer.out_proj.weight", 0.0)),
    "norm before the gate": ("falcon_h1, norm first", _filled(LAYERS + "2.mixer.norm.weight", 1.0)),
    "keys and values": (QWEN, _rolled(LAYERS + "0.mixer.in_proj.weight", 24)),
    "beta and alpha": (QWEN, lambda m: _rolled_rows(m, LAYERS + "0.mixer.in_proj.weight", slice(-6, None), 3)),
    "norm behind a gated delta net": (QWEN, _filled(LAYERS + "0.mixer.out_norm.weight", 0.0)),
    "bias of experts": ("lfm2 moe", lambda m: m.get_buffer(LAYERS + "3.mlp.router.expert_bias").mul_(-3)),
    "convolution of keys": ("olmo", _rolled(LAYERS + "0.mixer.conv1d.weight", 16)),
    "norm behind attention": ("olmo", _filled(LAYERS + "2.self_attention.output_norm.norm.weight", 1.0)),
    "norm behind an MLP": ("olmo", _filled(LAYERS + "3.mlp.output_norm.norm.weight", 1.0)),
    "norm of keys of all heads": ("olmo", _rolled(LAYERS + "2.self_attention.k_layernorm.weight", 8)),
    "two experts": ("granite, experts, rotary, tied", _rolled(LAYERS + "1.mlp.router.weight")),
    "the shared expert": (
        "granite, experts, rotary, tied",
        _filled(LAYERS + "1.mlp.shared_experts.linear_fc2.weight", 0.0),
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("control", CONTROLS)
@torch.no_grad()
def test_comparison_sees_one_wrong_tensor(control: str, hybrids) -> None:
    """Each error is at least ten times the tolerance."""
    name, spoil = CONTROLS[control]
    theirs, directory = hybrids(name)
    ours = load_model(SourceConfig(load_hf=str(directory)), {}, device=CPU).model
    spoil(ours)
    assert excess(ours, theirs) > 10


FALCON = "falcon_h1, no norm"
PARTS = (1.125, 1.375, 1.5, 1.0, 0.875)  # of that model, for z, x, B, C and dt
SETTINGS = [
    ("olmo", {"linear_allow_neg_eigval": False}),
    ("olmo", {"linear_norm_epsilon": 1e-2}),
    ("olmo", {"position_embedding_type": "none"}),
    (QWEN, {"rotary_percent": 0.25}),
    *((FALCON, {name: 0.9}) for name in MULTIPLIERS),
    *((FALCON, {"mamba_multipliers": (*PARTS[:i], 0.95, *PARTS[i + 1 :])}) for i in range(5)),
    ("bamba", {"rotary_percent": 1.0}),
    ("granite, dense", {"embedding_multiplier": 2.9}),
    ("granite, dense", {"residual_multiplier": 0.69}),
    ("granite, dense", {"softmax_scale": 0.19}),
    ("granite, dense", {"logits_multiplier": 0.41}),
    ("granite, dense", {"position_embedding_type": "rope"}),
]


@pytest.mark.long
@pytest.mark.parametrize(("name", "override"), SETTINGS, ids=str)
def test_comparison_sees_one_wrong_setting(name: str, override: dict, hybrids) -> None:
    """Flags win over the checkpoint; these have no weights that could contradict them."""
    theirs, directory = hybrids(name)
    said = {setting: getattr(load_hf(directory).config, setting) for setting in override}
    assert said != override
    assert excess(load_model(SourceConfig(load_hf=str(directory)), override, device=CPU).model, theirs) > 10


def test_the_parts_of_a_projection(hybrids) -> None:
    """The settings above have the effect that the file states: the input's factor times each part's."""
    assert load_hf(hybrids(FALCON)[1]).config.mamba_multipliers == pytest.approx(PARTS)
