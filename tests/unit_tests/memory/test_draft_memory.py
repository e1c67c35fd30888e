"""The pools of layers that draft share the budget: in the geometry, in the errors, in what is allocated (SP-10)."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_ext.config import BatchingConfig, CacheConfig
from megatron_ext.errors import ConfigError
from megatron_ext.memory.budget import GIB, DraftMemory, ModelMemory, plan_memory
from megatron_ext.memory.fitting import plan_within

ALONE = ModelMemory(kv_bytes_per_token=1024, state_bytes=100_000, chunk_size=128, max_sequence_length=4096)
DRAFT = DraftMemory(kv_bytes_per_token=256, state_bytes=10_000)
TOGETHER = dataclasses.replace(ALONE, draft=DRAFT)
ON = CacheConfig()


def geometry(model, **batching):
    return plan_memory(model, BatchingConfig(**batching), ON, "cpu")


def test_trunk_and_layers_share_the_buffer():
    """SP-10: the buffer holds fewer blocks, as many for either, beside the running states of both."""
    alone, both = geometry(ALONE, buffer_size_gb=1.0), geometry(TOGETHER, buffer_size_gb=1.0)
    left = GIB - 64 * 100_000 - 2 * 64 * 10_000
    assert both.blocks == left // (64 * (1024 + 256)) - 1 < alone.blocks
    assert (both.draft_layers.block_bytes, both.draft_layers.state_bytes) == (64 * 256, 10_000)
    assert both.draft_layers.states == 2 * 64
    snapshots = both.snapshot_slots * 100_000
    assert both.pool_bytes - snapshots <= GIB < both.pool_bytes - snapshots + 64 * (1024 + 256)


def test_hidden_states_that_drafts_read_are_counted():
    """SP-10: those of every request that can run."""
    hidden = dataclasses.replace(ALONE, draft=dataclasses.replace(DRAFT, hidden_bytes=50_000))
    without, both = geometry(TOGETHER, buffer_size_gb=1.0), geometry(hidden, buffer_size_gb=1.0)
    left = GIB - 64 * 100_000 - 2 * 64 * 10_000 - 64 * 50_000
    assert both.blocks == left // (64 * (1024 + 256)) - 1 < without.blocks
    assert both.shown()["draft_layers"]["hidden_bytes"] == 64 * 50_000
    one, other = geometry(hidden, block_count=8), geometry(TOGETHER, block_count=8)
    assert one.pool_bytes == other.pool_bytes + 64 * 50_000


def test_nothing_of_it_is_shown_without_one():
    alone = geometry(ALONE, block_count=8)
    assert "draft_layers" not in alone.shown()
    both = geometry(TOGETHER, block_count=8)
    assert both.shown() == alone.shown() | {
        "draft_layers": {"block_bytes": 64 * 256, "state_bytes": 10_000, "states": 128}
    }
    assert both.pool_bytes == alone.pool_bytes + 9 * 64 * 256 + 128 * 10_000


def test_errors_count_it():
    with pytest.raises(
        ConfigError, match=r"one block and the dummy block\); give at least .* GB \(drafting layers included"
    ):
        geometry(TOGETHER, buffer_size_gb=0.001)
    with pytest.raises(ConfigError, match="drafting layers included"):
        plan_within(TOGETHER, BatchingConfig(block_count=99), ON, "cpu", 1000)
    batching = BatchingConfig(buffer_size_gb=4.0)
    with pytest.raises(ConfigError) as error:
        plan_within(TOGETHER, batching, ON, "cpu", GIB)
    enough = float(str(error.value).split("-buffer-size-gb ")[1].split(" ")[0])
    plan_within(TOGETHER, BatchingConfig(buffer_size_gb=enough), ON, "cpu", GIB)
