"""Sizes of pools, by hand, and errors whose suggested numbers work."""

from __future__ import annotations

import dataclasses
import re

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from megatron_ext.config import BatchingConfig, CacheConfig
from megatron_ext.errors import ConfigError
from megatron_ext.memory.budget import (
    GIB,
    KVCacheConfig,
    ModelMemory,
    plan_memory,
)

HYBRID = ModelMemory(kv_bytes_per_token=1024, state_bytes=100_000, chunk_size=128, max_sequence_length=4096)
ATTENTION = dataclasses.replace(HYBRID, state_bytes=0)
RECURRENT = dataclasses.replace(HYBRID, kv_bytes_per_token=0)
MIB = 2**20


OFF = CacheConfig(enable_prefix_caching=False)


def plan(
    model: ModelMemory, device_type: str = "cpu", *, cache: CacheConfig = OFF, **batching: object
) -> KVCacheConfig:
    return plan_memory(model, BatchingConfig(**batching), cache, device_type)


def number_to_give(error: ConfigError, unit: str = " GB") -> float:
    return float(re.search(rf"give (?:at least )?([0-9.]+){unit}", str(error)).group(1))


class TestByHand:
    def test_a_hybrid(self):
        """1 GiB less 64 states of 100,000 bytes is 1,067,341,824: 16,286 blocks of 64 KiB, one of them the dummy."""
        assert plan(HYBRID) == KVCacheConfig(
            block_size_tokens=64,
            block_bytes=65_536,
            state_bytes=100_000,
            state_in_kv_tokens=98,  # 97.66, rounded up
            blocks=16_285,
            snapshot_slots=0,
            live_states=64,
            kernel_chunk=64,
            shortest_prompt_that_can_hit=None,
        )

    def test_log_probs(self):
        """RL-10, EX-6: in the same GiB, each block with 64 log-probs and a hidden state of 896 numbers of 16 bits."""
        with_log_probs = dataclasses.replace(ATTENTION, log_prob_bytes=64 * 4 + 896 * 2)
        geometry = plan(with_log_probs)
        assert geometry.blocks == GIB // (65_536 + 2048) - 1
        assert geometry.pool_bytes == (geometry.blocks + 1) * (65_536 + 2048)
        assert geometry.shown()["log_prob_bytes"] == 2048
        assert plan(dataclasses.replace(with_log_probs, kv_bytes_per_token=0)).blocks == plan(RECURRENT).blocks

    def test_the_shortest_prompt_that_can_hit_fills_a_block(self):
        """EX-6: the prompt has one token more, which is computed; or it is the block, whose last token is computed."""
        on = CacheConfig()
        assert plan(ATTENTION, cache=on, block_size=48).shortest_prompt_that_can_hit == 48
        assert plan(HYBRID, cache=on, block_size=48).shortest_prompt_that_can_hit == 49
        assert plan(HYBRID, cache=CacheConfig(snapshot_slots=0)).shortest_prompt_that_can_hit is None
        assert plan(ATTENTION).shortest_prompt_that_can_hit is None

    @pytest.mark.parametrize(("megabytes", "blocks"), [(0.125, 1), (0.1875, 2), (1, 15), (10, 159)])
    def test_the_buffer_is_in_gib(self, megabytes: float, blocks: int):
        """The dummy block is one of the blocks that fit."""
        assert plan(ATTENTION, buffer_size_gb=megabytes / 1024).blocks == blocks

    def test_without_attention_blocks_never_run_out(self):
        geometry = plan(RECURRENT, max_requests=5, block_size=48)
        assert geometry.blocks == 5 * 86  # 4096 / 48 = 85.3
        assert (geometry.block_bytes, geometry.state_in_kv_tokens) == (0, None)


class TestTooSmall:
    @settings(max_examples=300, deadline=None)
    @given(
        per_token=st.one_of(st.just(0), st.integers(1, 10**7)),
        state=st.integers(0, 10**9),
        requests=st.integers(1, 512),
        block_size=st.sampled_from([16, 64, 256, 1024]),
    )
    def test_any_model(self, per_token: int, state: int, requests: int, block_size: int):
        model = ModelMemory(per_token, state, chunk_size=128, max_sequence_length=4096)
        batching = {"max_requests": requests, "block_size": block_size}
        needed = requests * state + 2 * block_size * per_token
        if needed == 0:
            return
        with pytest.raises(ConfigError) as caught:
            plan(model, buffer_size_gb=0.0, **batching)
        enough = number_to_give(caught.value)
        assert plan(model, buffer_size_gb=enough, **batching).blocks >= 1
        assert (enough - 1e-6) * GIB < needed


class TestBlockSize:
    @pytest.mark.parametrize(("block_size", "fitting"), [(1, 16), (15, 16), (17, 16), (50, 48), (100, 96), (250, 256)])
    def test_states_need_a_multiple_of_16(self, block_size: int, fitting: int):
        """HY-12: other block sizes are a start-up error, which names one that would do."""
        with pytest.raises(ConfigError) as caught:
            plan(HYBRID, block_size=block_size)
        assert f"block size {block_size}" in str(caught.value)
        assert number_to_give(caught.value, unit="") == fitting
        assert plan(HYBRID, block_size=fitting).block_size_tokens == fitting

    @pytest.mark.parametrize("is_caching", [False, True])
    @pytest.mark.parametrize("block_size", [16, 48, 64, 256])
    @pytest.mark.parametrize(
        ("device", "chunk", "kernel_chunk"), [("cpu", 128, 64), ("cpu", 32, 32), ("cuda", 128, 128)]
    )
    def test_kernel_chunk(self, block_size: int, device: str, chunk: int, kernel_chunk: int, is_caching: bool):
        """HY-12, M1-4: the model's chunk, or less where that is faster; blocks and caching do not matter."""
        model = dataclasses.replace(HYBRID, chunk_size=chunk)
        cache = CacheConfig(enable_prefix_caching=is_caching)
        planned = plan(model, device, cache=cache, block_size=block_size, buffer_size_gb=1.0)
        assert planned.kernel_chunk == kernel_chunk


def test_more_blocks_than_can_be_counted():
    """Blocks without attention cost nothing on the device, but still need entries in lists."""
    with pytest.raises(ConfigError, match=r"104857600 blocks are too many; .*-block-count must be at most 16777216"):
        plan(dataclasses.replace(RECURRENT, state_bytes=1, max_sequence_length=2**24), max_requests=100, block_size=16)
    assert plan(RECURRENT, block_count=2**24).blocks == 2**24


class TestSnapshots:
    """HY-1: slots of the snapshot pool."""

    MODEL = dataclasses.replace(HYBRID, state_bytes=MIB)

    def slots(self, model: ModelMemory = MODEL, buffer_size_gb: float | None = None, **cache: object) -> int:
        batching = {} if buffer_size_gb is None else {"buffer_size_gb": buffer_size_gb}
        return plan(model, cache=CacheConfig(**cache), **batching).snapshot_slots

    def test_the_automatic_budget_is_a_quarter_of_the_buffer_and_two_at_least(self):
        assert self.slots() == 256
        assert self.slots(buffer_size_gb=0.5) == 128
        assert self.slots(dataclasses.replace(HYBRID, state_bytes=10 * MIB), buffer_size_gb=0.7) == 17
        assert plan(self.MODEL, cache=CacheConfig(), block_count=3).snapshot_slots == 2

    def test_too_little_for_one_names_a_sufficient_size(self):
        with pytest.raises(
            ConfigError, match=r"mamba-gb 0\.0005 is too small for one snapshot of 1048576 bytes"
        ) as caught:
            self.slots(snapshot_buffer_gb=0.0005)
        number = float(re.search(r"at least ([0-9.]+)", str(caught.value)).group(1))
        assert self.slots(snapshot_buffer_gb=number) == 1
