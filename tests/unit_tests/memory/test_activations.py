"""EX-6: the temporary tensors of a full step are counted, and part of the plan."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_ext.config import BatchingConfig, CacheConfig, ModelConfig
from megatron_ext.errors import ConfigError
from megatron_ext.mcore import platform
from megatron_ext.memory.activations import (
    DECODE_BYTES,
    DECODE_GROUP,
    DECODE_SLOTS,
    DECODE_SPAN,
    DRAWN_BYTES,
    DRAWN_ROWS,
    PREFILL_SPAN,
    SPLIT_ELEMENTS,
    SPLIT_TILES,
    TILE,
    TILE_ELEMENTS,
    FullStep,
    LayerWidths,
    activation_bytes,
    thread_sums,
)
from megatron_ext.memory.budget import GIB, ModelMemory
from megatron_ext.memory.fitting import plan_within
from megatron_ext.ops import triton
from megatron_ext.ops.gated_delta_rule import GATED_DELTA_RULE
from megatron_ext.ops.selective_scan import SELECTIVE_SCAN
from tests.unit_tests.support.drafters import ANSWERS, Knowing
from tests.unit_tests.support.driver import Driver, make_prompt
from tests.unit_tests.support.models import CONFIGS
from tools.kernel_checks.layer_calls import Calls
from tools.kernel_checks.sizes import MAX_LENGTH, MODELS, DeltaNet, Model, Step
from tools.kernel_checks.virtual_launch import MadeBytes, recording

TOKENS = 1024


class PeakBytes(TorchDispatchMode):
    """Maximum of the bytes of tensors that were made within the mode and are alive at once.

    Attributes:
        peak: Bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {one.untyped_storage()._cdata for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)}
        found = func(*args, **(kwargs or {}))
        for one in tree_leaves(found):
            if isinstance(one, torch.Tensor) and one.untyped_storage()._cdata not in given:
                storage = one.untyped_storage()
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {key: one for key, one in self._alive.items() if not one[0].expired()}
        self.peak = max(self.peak, sum(count for _, count in self._alive.values()))
        return found


def peak_of_a_prefill(driver: Driver) -> int:
    """Return the peak of the forward of a step with one prompt of TOKENS tokens."""
    controller, peaks = driver.engine.controller, []
    forward = controller.forward

    def measured():
        with PeakBytes() as measure:
            found = forward()
        peaks.append(measure.peak)
        return found

    controller.forward = measured
    driver.add(0, make_prompt(TOKENS), num_tokens_to_generate=1, return_log_probs=False)
    driver.run()
    assert len(peaks) == 1
    return peaks[0]


REFERENCES = {"mamba1": (SELECTIVE_SCAN, 1.03), "gated_delta_net": (GATED_DELTA_RULE, 1.5)}
"""Operators whose references are not counted, by kind of layer, with the maximum that they take relative to that."""


def maximum(kind: str, device: torch.device) -> float:
    """Return the bytes that a prefill may take relative to the count: as many, unless such a reference computes it."""
    operator, more = REFERENCES.get(kind, (None, 1.0))
    is_counted = operator is None or operator.backends.choose(torch.empty(1, device=device)).name != "reference"
    return 1.0 if is_counted else more


@pytest.mark.parametrize(
    "kind", ["hybrid", "mamba1", "gated_delta_net", "short_conv", "side_by_side", "attention_only", "experts"]
)
def test_a_step_takes_what_was_counted(get_oracle, kind):
    """A prefill of 1,024 tokens allocates at most as much, and at least a fifth; see `REFERENCES`."""
    driver = Driver(get_oracle(kind).model, CONFIGS[kind], max_requests=1, max_tokens=TOKENS, max_sequence_length=1100)
    states = driver.context.plan.shape.states
    widths = LayerWidths(4) if states is None else LayerWidths(4, 1.0, states.conv[0], torch.Size(states.ssm).numel())
    counted = activation_bytes(CONFIGS[kind], FullStep(TOKENS, 1, 1100, is_cuda=False), widths)
    peak = peak_of_a_prefill(driver)
    assert counted / 5 <= peak <= counted * maximum(kind, driver.context.staging_rules.device)


def config_of(model: Model) -> ModelConfig:
    """Architecture with a model's sizes, one layer of each kind."""
    attention, recurrence = model.attention, model.recurrence
    sizes = {
        "hidden_size": model.hidden,
        "vocab_size": model.vocabulary,
        "num_attention_heads": attention.heads,
        "num_query_groups": attention.kv_heads,
        "kv_channels": attention.head_size,
        "ffn_hidden_size": model.mlp,
        "swiglu": model.gated,
        "squared_relu": not model.gated,
    }
    if isinstance(recurrence, DeltaNet):
        return ModelConfig(hybrid_override_pattern="M*-", recurrent_layer="gated_delta_net", **sizes)
    mamba = {"mamba_num_heads": recurrence.heads, "mamba_head_dim": recurrence.head_dim}
    mamba |= {"mamba_num_groups": recurrence.groups, "mamba_state_dim": recurrence.states}
    return ModelConfig(hybrid_override_pattern="M*-", **mamba, **sizes)


def allocated(model: Model, step: Step) -> dict[str, int]:
    """Return the bytes that the Triton operators of each part of a layer allocate, without running any kernel."""
    found = {}
    for name, call in Calls(model, step).all():
        with MadeBytes() as made, recording():
            call()
        found[name] = made.total
    return found


def counted_bytes(model: Model, step: Step) -> int:
    recurrence = model.recurrence
    widths = LayerWidths(2, 1.0, recurrence.conv_channels, torch.Size(recurrence.state_shape).numel())
    return activation_bytes(config_of(model), FullStep(step.rows, step.decodes or 1, MAX_LENGTH, is_cuda=True), widths)


@pytest.mark.long
@pytest.mark.skipif(not triton.is_interpreted(), reason="kernels are not interpreted here")
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_operators_of_real_models_take_what_was_counted(model):
    """Each part of a layer, in prefills, one after cached keys, and in 256 decodes; nothing of that size is made."""
    warm = Step(0, 64, 131_072, is_captured=True)
    for step in (Step(0, 16_384, 0, is_captured=False), Step(256, 0, 131_072, is_captured=True), warm):
        found = allocated(model, step)
        assert max(found.values()) <= counted_bytes(model, step), step.name
        if not step.decodes:  # the count of a step of 256 requests has states for as many prefills
            assert max(found.values()) >= counted_bytes(model, step) / 5, step.name


@pytest.mark.long
@pytest.mark.skipif(not triton.is_interpreted(), reason="kernels are not interpreted here")
def test_an_operator_that_takes_more_is_seen(monkeypatch):
    """The negative control: scores of all pairs of tokens."""
    from megatron_ext.ops.paged_attention import kernels as paged_attention

    plain, step = paged_attention.launch_paged_attention, Step(0, 16_384, 0, is_captured=False)

    def wasteful(q, *arguments, **options):
        q.new_empty(len(q), len(q), q.shape[1])
        return plain(q, *arguments, **options)

    monkeypatch.setattr(paged_attention, "launch_paged_attention", wasteful)
    assert allocated(MODELS[0], step)["attention"] > counted_bytes(MODELS[0], step)


@pytest.mark.skipif(not triton.is_interpreted(), reason="kernels are not interpreted here")
def test_sizes_of_kernels_are_those_counted():
    from megatron_ext.ops.paged_attention import kernels
    from megatron_ext.ops.sampling import kernels as sampling
    from megatron_ext.ops.ssd import kernels_tiles

    assert (kernels.SPAN, kernels.GROUP, kernels.PREFILL_SPAN) == (DECODE_SPAN, DECODE_GROUP, PREFILL_SPAN)
    assert (kernels.PARTIAL_BYTES, kernels.FEWEST_SLOTS) == (DECODE_BYTES, DECODE_SLOTS)
    assert (kernels.FEW_TILES, kernels.FEW_ELEMENTS) == (SPLIT_TILES, SPLIT_ELEMENTS)
    tiles = kernels.paged_prefill.configs
    assert max(one["M"] * one["DP"] for one in tiles) == TILE_ELEMENTS
    assert max(one["M"] for one in tiles) == 128
    assert kernels_tiles.TILE == TILE
    assert sampling.MAX_ROWS == DRAWN_ROWS


def test_scratch_of_draws_is_counted_for_as_many_rows_as_are_drawn_at_once():
    """CU-30: a row of fp32 each up to 128 rows, on CUDA only, beside the logits."""
    config = CONFIGS["attention_only"]

    def counted(requests: int, *, is_cuda: bool) -> int:
        return activation_bytes(config, FullStep(TOKENS, requests, 1, is_cuda=is_cuda), LayerWidths(2))

    logits = config.vocab_size * (2 + 4 + 4)
    assert counted(128, is_cuda=False) - counted(127, is_cuda=False) == logits
    sums = config.num_attention_heads * (config.head_channels + 2) * 4  # attention's, of one span
    assert counted(128, is_cuda=True) - counted(127, is_cuda=True) == logits + config.vocab_size * 4 + sums
    assert counted(129, is_cuda=True) - counted(128, is_cuda=True) == logits + sums


def test_drafts_and_threads_are_counted():
    """EX-6, LA-4: each draft yields a row of logits; each thread of a CPU draws from a row and keeps partial sums."""
    config = CONFIGS["attention_only"]

    def counted(tokens: int = TOKENS, **step: int) -> int:
        return activation_bytes(config, FullStep(tokens, 128, 1, is_cuda=False, **step), LayerWidths(2))

    logits = config.vocab_size * (2 + 4 + 4)
    assert counted(drafts=3) - counted() == 128 * 3 * logits
    assert counted(drafts=15) == counted(drafts=7), "a step has no more rows than tokens"
    per_thread = config.vocab_size * DRAWN_BYTES + thread_sums(config.head_channels)
    assert counted(threads=8) - counted() == 7 * per_thread


def test_an_engine_counts_the_rows_of_its_drafts(get_oracle, monkeypatch):
    """EX-6, LA-4."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # each thread draws a row
    model, config = get_oracle("attention_only").model, CONFIGS["attention_only"]
    plain, drafting = (
        Driver(model, config, max_requests=4, max_tokens=64, **options).context.plan.activation_bytes
        for options in ({}, {"drafter": Knowing(ANSWERS["right"]), "speculative_tokens": 3})
    )
    scratch = 4 if next(model.parameters()).is_cuda else 0  # bytes of a word that CUDA draws from
    assert drafting - plain == 4 * 3 * config.vocab_size * (12 + scratch)


def test_a_plan_leaves_room_for_the_largest_step():
    """EX-6: pools that fit alone are refused if a full step does not fit beside them; what is advised then fits."""
    model = ModelMemory(kv_bytes_per_token=1024, state_bytes=0, chunk_size=128, max_sequence_length=4096)
    batching, cache = BatchingConfig(buffer_size_gb=0.75), CacheConfig()
    geometry = plan_within(model, batching, cache, "cpu", GIB)
    with_step = dataclasses.replace(model, activation_bytes=GIB // 2)
    with pytest.raises(ConfigError, match=r"need 0.75 GB, the largest step 0.5 GB, and 1.00 GB .*-gb 0.4"):
        plan_within(with_step, batching, cache, "cpu", GIB)
    smaller = plan_within(with_step, dataclasses.replace(batching, buffer_size_gb=0.4), cache, "cpu", GIB)
    assert 0 < smaller.pool_bytes + GIB // 2 <= GIB
    assert geometry.pool_bytes + GIB // 2 > GIB


def test_an_engine_counts_its_largest_step(get_oracle, monkeypatch):
    """EX-6: with more tokens in a step less memory is left for pools."""
    model, config, free = get_oracle("hybrid").model, CONFIGS["hybrid"], 64 << 20
    monkeypatch.setattr(platform, "available_memory", lambda device: free)
    settings = {"block_count": 1000, "max_sequence_length": 2048}
    Driver(model, config, max_tokens=512, **settings)
    with pytest.raises(ConfigError, match=r"the largest step [0-9.]+ GB, and 0\.06 GB of memory are free"):
        Driver(model, config, max_tokens=16_384, **settings)
