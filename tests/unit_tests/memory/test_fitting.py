"""SE-4: pools that do not fit are refused with a number that fits, and that number does fit."""

from __future__ import annotations

import dataclasses
import re
import shlex

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from arguments import parse_arguments
from megatron_ext.config import BatchingConfig, CacheConfig
from megatron_ext.errors import ConfigError
from megatron_ext.memory import fitting
from megatron_ext.memory.budget import GIB, ModelMemory, plan_memory
from megatron_ext.memory.fitting import advice_that_fits, largest_allocation, plan_within

HYBRID = ModelMemory(kv_bytes_per_token=1024, state_bytes=100_000, chunk_size=128, max_sequence_length=4096)
ATTENTION = dataclasses.replace(HYBRID, state_bytes=0)
ON = CacheConfig()


def refusal(model: ModelMemory, batching: BatchingConfig, cache: CacheConfig, available: int) -> str:
    with pytest.raises(ConfigError) as caught:
        plan_within(model, batching, cache, "cpu", available)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def suggested(message: str, batching: BatchingConfig, cache: CacheConfig) -> tuple[BatchingConfig, CacheConfig]:
    """The settings as given, with those flags of the advice."""
    flags = shlex.split(" ".join(re.findall(r"--[a-z-]+ [0-9.]+", message.rpartition(";")[2])))
    given = parse_arguments(flags)
    sizes = {name: getattr(given.batching, name) for name in ("block_count", "buffer_size_gb")}
    if not any(sizes.values()):
        sizes = {name: getattr(batching, name) for name in sizes}
    if "max-requests" in message:
        sizes["max_requests"] = given.batching.max_requests
    slots = given.cache.snapshot_slots
    new_cache = cache if slots is None else dataclasses.replace(cache, snapshot_slots=slots, snapshot_buffer_gb=None)
    return dataclasses.replace(batching, **sizes), new_cache


def test_sizes_that_fit_are_unchanged():
    batching = BatchingConfig(block_count=99, max_requests=3)
    geometry = plan_memory(HYBRID, batching, ON, "cpu")
    states = 3 + geometry.snapshot_slots
    assert geometry.pool_bytes == 100 * 64 * 1024 + states * 100_000
    assert plan_within(HYBRID, batching, ON, "cpu", geometry.pool_bytes) == geometry
    message = refusal(HYBRID, batching, ON, geometry.pool_bytes - 1)
    assert f"{geometry.pool_bytes / GIB:.3f}"[:4] in message
    assert "GB of memory are free for this process; give --inference-dynamic-batching-block-count" in message


@pytest.mark.parametrize(
    ("batching", "cache", "available", "flag"),
    [
        (BatchingConfig(), ON, GIB // 2, "-buffer-size-gb 0.32"),  # 0.8 * 0.5 GB, and a quarter for snapshots
        (BatchingConfig(buffer_size_gb=8.0), CacheConfig(enable_prefix_caching=False), GIB, "-buffer-size-gb 0.8"),
        (BatchingConfig(block_count=10_000), CacheConfig(snapshot_slots=0), 2**28, "-block-count 3178"),
        (BatchingConfig(), CacheConfig(snapshot_slots=9000), 2**28, "-mamba-slots 2082"),
        (BatchingConfig(max_requests=9000), ON, 2**28, "-max-requests 2146"),
        # Sizes are suggested in hundredths: 0.019 is cut to the 0.01 that fit.
        (
            BatchingConfig(buffer_size_gb=0.019),
            CacheConfig(enable_prefix_caching=False),
            int(0.0135 * GIB),
            "-buffer-size-gb 0.01",
        ),
    ],
)
def test_by_hand(batching: BatchingConfig, cache: CacheConfig, available: int, flag: str):
    message = refusal(HYBRID, batching, cache, available)
    assert flag in message
    plan_within(HYBRID, *suggested(message, batching, cache), "cpu", available)


def test_where_nothing_helps():
    message = refusal(HYBRID, BatchingConfig(), ON, 1000)
    assert "not even one request fits: free some memory, use a smaller model, or fewer tokens in a step" in message


@settings(max_examples=25, deadline=None)
@given(
    model=st.sampled_from([HYBRID, ATTENTION, dataclasses.replace(HYBRID, kv_bytes_per_token=16, state_bytes=10**7)]),
    batching=st.builds(
        BatchingConfig,
        buffer_size_gb=st.one_of(st.none(), st.floats(0.01, 20)),
        max_requests=st.integers(1, 2000),
    )
    | st.builds(BatchingConfig, block_count=st.integers(1, 10**6), max_requests=st.integers(1, 2000)),
    cache=st.builds(CacheConfig, snapshot_slots=st.one_of(st.none(), st.integers(0, 5000)))
    | st.builds(CacheConfig, snapshot_buffer_gb=st.floats(0.1, 9)),
    available=st.integers(10**6, 4 * 10**9),
)
def test_the_advice_can_be_followed(model: ModelMemory, batching: BatchingConfig, cache: CacheConfig, available: int):
    try:
        plan_within(model, batching, cache, "cpu", available)
    except ConfigError as error:
        message = str(error)
        if "free for this process" in message and "not even" not in message:
            plan_within(model, *suggested(message, batching, cache), "cpu", available)


def test_finds_the_largest_size_that_can_be_allocated(monkeypatch: pytest.MonkeyPatch):
    def empty(count: int, **_: object) -> None:
        if count > 3000:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(fitting.torch, "empty", empty)
    assert largest_allocation(torch.device("cpu"), 10_000) == 2500
    assert largest_allocation(torch.device("cpu"), 100) == 100
    assert "-buffer-size-gb 0.01" in advice_that_fits(HYBRID, BatchingConfig(max_requests=1), ON, "cpu", 20 * 2**20)
