"""LA-4, SP-2: states after drafts are in the budget, the KV cache sizes, the errors, and in the agreement of ranks."""

from __future__ import annotations

import dataclasses

from megatron_ext.config import BatchingConfig, CacheConfig
from megatron_ext.memory.budget import ModelMemory, plan_memory
from megatron_ext.memory.capacity import Capacity, agree, world_kv_cache_config

MODEL = ModelMemory(kv_bytes_per_token=1024, state_bytes=100_000, chunk_size=128, max_sequence_length=4096)
DRAFTING = dataclasses.replace(MODEL, speculative_tokens=5)
OFF = CacheConfig(enable_prefix_caching=False)


def test_they_come_off_the_buffer():
    """64 requests have 5 states more each: 32,000,000 bytes, 489 blocks of 64 KiB."""
    plain, drafting = (plan_memory(model, BatchingConfig(), OFF, "cpu") for model in (MODEL, DRAFTING))
    assert (plain.draft_states, drafting.draft_states) == (0, 320)
    assert 0 <= plain.blocks - drafting.blocks - 488 <= 1
    assert plain.pool_bytes - drafting.pool_bytes < 65_536, "the budget is the same"


def test_ranks_agree():
    """A rank without recurrent layers has none, and the world as many as those that have."""
    config = BatchingConfig(block_count=10, max_requests=3)
    models = (DRAFTING, dataclasses.replace(DRAFTING, state_bytes=0))
    capacities = [Capacity(plan_memory(model, config, CacheConfig(snapshot_slots=2), "cpu"), None) for model in models]
    agreed = [capacity.geometry for capacity in agree(capacities, slots_within_blocks=False)]
    assert [one.draft_states for one in agreed] == [15, 0]
    assert world_kv_cache_config(agreed, (0, 1)).draft_states == 15
