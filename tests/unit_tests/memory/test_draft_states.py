"""LA-4, SP-2: states after drafts are in the budget, the KV cache sizes, the errors, and in the agreement of ranks."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_ext.config import BatchingConfig, CacheConfig
from megatron_ext.errors import ConfigError
from megatron_ext.memory.budget import ModelMemory, plan_memory
from megatron_ext.memory.capacity import Capacity, agree, world_kv_cache_config
from tests.unit_tests.memory.test_budget import number_to_give

MODEL = ModelMemory(kv_bytes_per_token=1024, state_bytes=100_000, chunk_size=128, max_sequence_length=4096)
DRAFTING = dataclasses.replace(MODEL, speculative_tokens=5)
OFF = CacheConfig(enable_prefix_caching=False)


def test_they_come_off_the_buffer():
    """64 requests have 5 states more each: 32,000,000 bytes, 489 blocks of 64 KiB."""
    plain, drafting = (plan_memory(model, BatchingConfig(), OFF, "cpu") for model in (MODEL, DRAFTING))
    assert (plain.draft_states, drafting.draft_states) == (0, 320)
    assert 0 <= plain.blocks - drafting.blocks - 488 <= 1
    assert plain.pool_bytes - drafting.pool_bytes < 65_536, "the budget is the same"


def test_attention_needs_none():
    model = dataclasses.replace(DRAFTING, state_bytes=0)
    assert plan_memory(model, BatchingConfig(), OFF, "cpu").draft_states == 0


def test_a_buffer_that_is_too_small():
    """The error names their size, and a number that fits."""
    with pytest.raises(ConfigError, match=r"64 requests, each with 5 more after drafts.*--num-speculative") as caught:
        plan_memory(DRAFTING, BatchingConfig(buffer_size_gb=0.03), OFF, "cpu")
    enough = number_to_give(caught.value)
    plan_memory(DRAFTING, BatchingConfig(buffer_size_gb=enough), OFF, "cpu")


def test_ranks_agree():
    """A rank without recurrent layers has none, and the world as many as those that have."""
    config = BatchingConfig(block_count=10, max_requests=3)
    models = (DRAFTING, dataclasses.replace(DRAFTING, state_bytes=0))
    capacities = [Capacity(plan_memory(model, config, CacheConfig(snapshot_slots=2), "cpu"), None) for model in models]
    agreed = [capacity.geometry for capacity in agree(capacities, slots_within_blocks=False)]
    assert [one.draft_states for one in agreed] == [15, 0]
    assert world_kv_cache_config(agreed, (0, 1)).draft_states == 15
