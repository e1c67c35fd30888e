"""Invariants between the parts of a prefix cache."""

from __future__ import annotations

from collections.abc import Set

from megatron_ext.prefix_cache.block_index import BlockIndex
from megatron_ext.prefix_cache.block_pool import BlockId, BlockPool
from megatron_ext.prefix_cache.cached_token_ids import CachedTokenIds
from megatron_ext.prefix_cache.eviction_history import EvictionHistory
from megatron_ext.prefix_cache.shared_memory import SharedMemory
from megatron_ext.prefix_cache.state_index import StateIndex


def check_blocks(index: BlockIndex, pool: BlockPool, evictable: Set[BlockId]) -> None:
    """Assert that cached blocks are evictable or in use, and none is in use whose parent is not."""
    assert evictable == pool.evictable, "the policy and the pool disagree on evictable blocks"
    assert evictable <= set(index), "an evictable block is not indexed"
    for block in index:
        assert block in evictable or pool.references(block) > 0, f"cached block {block} is free"
        parent = index.parent(block)
        assert parent is None or block in evictable or parent not in evictable, (
            f"block {block} outlives its parent's use"
        )


def check_memory(index: BlockIndex, pool: BlockPool, states: StateIndex | None, memory: SharedMemory | None) -> None:
    """Assert that the index is a sound forest, and that pool and slots hold each of their places once."""
    index.check()
    if memory is not None:
        memory.check(index.block_hashes())
        return
    pool.check()
    if states is not None:
        states.check(index.block_hashes())


def check_notes(
    index: BlockIndex, states: StateIndex | None, cached_token_ids: CachedTokenIds | None, history: EvictionHistory
) -> None:
    """Assert that notes of token ids and of evicted entries agree with what is cached."""
    cached = set(index.block_hashes())
    if cached_token_ids is not None:
        cached_token_ids.check(cached)
    history.check(cached, set() if states is None else {one for one in cached if states.find(one) is not None})
