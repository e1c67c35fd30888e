"""Invariants between the parts of a prefix cache."""

from __future__ import annotations

from collections.abc import Set

from megatron_ext.prefix_cache.block_index import BlockIndex
from megatron_ext.prefix_cache.block_pool import BlockId, BlockPool


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
