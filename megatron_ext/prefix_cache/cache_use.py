"""Statistics of a prefix cache."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.prefix_cache.block_pool import BlockPool
from megatron_ext.prefix_cache.shared_memory import SharedMemory
from megatron_ext.prefix_cache.state_index import StateIndex


@dataclass(frozen=True)
class CacheUse:
    """Statistics of the cache: blocks and slots by state, and events since the engine started."""

    blocks_total: int
    blocks_cached: int  # indexed, in use or not
    blocks_evictable: int  # indexed and not in use
    blocks_in_use: int
    blocks_evicted: int  # over the engine's life
    slots_total: int  # of snapshots
    slots_used: int
    slots_evicted: int  # evicted for want of a slot; over the engine's life, as the next three
    snapshots_taken: int
    snapshots_skipped: int  # for want of a slot
    snapshots_replaced: int  # in decode, by the next one of the same request
    provisional_slots: int  # with opportunistic snapshots, which the numbers above leave out
    provisional_taken: int  # over the engine's life, as the next two
    provisional_consumed: int
    provisional_given_up: int
    slabs_total: int = 0  # of memory that blocks and snapshots share; with it, the totals above change as slabs do
    slabs_of_blocks: int = 0
    slabs_of_snapshots: int = 0
    slabs_retyped: int = 0  # changes between blocks and snapshots, over the engine's life
    blocks_moved: int = 0  # to free a slab, over the engine's life


def cache_use(
    pool: BlockPool,
    cached: int,
    evictable: int,
    evicted: int,
    states: StateIndex | None,
    memory: SharedMemory | None,
) -> CacheUse:
    """Return the statistics of a cache.

    Args:
        pool: Blocks.
        cached: Indexed blocks.
        evictable: Indexed blocks that no request uses.
        evicted: Blocks evicted over the engine's life.
        states: Index of snapshots; None without recurrent layers.
        memory: Memory that blocks and snapshots share; None if each has its own.
    """
    total = pool.total - (0 if memory is None else memory.occupied_by_snapshots)
    return CacheUse(
        blocks_total=total,
        blocks_cached=cached,
        blocks_evictable=evictable,
        blocks_in_use=total - pool.free_count - evictable,
        blocks_evicted=evicted,
        **_slot_use(states or StateIndex(0)) | ({} if memory is None else _slab_use(memory)),
    )


def _slot_use(states: StateIndex) -> dict[str, int]:
    """Return the fields about snapshots."""
    return {
        "slots_total": states.total,
        "slots_used": states.used_count,
        "slots_evicted": states.evicted,
        "snapshots_taken": states.taken,
        "snapshots_skipped": states.skipped,
        "snapshots_replaced": states.replaced,
        "provisional_slots": states.used_provisional_count,
        "provisional_taken": states.opportunistic.taken,
        "provisional_consumed": states.opportunistic.consumed,
        "provisional_given_up": states.opportunistic.given_up,
    }


def _slab_use(memory: SharedMemory) -> dict[str, int]:
    """Return the fields about the memory that blocks and snapshots share."""
    arena = memory.arena
    return {
        "slots_total": arena.snapshot_count,
        "slabs_total": arena.layout.slabs,
        "slabs_of_blocks": arena.blocks.slab_count,
        "slabs_of_snapshots": arena.snapshot_count,
        "slabs_retyped": arena.retyped_count,
        "blocks_moved": arena.blocks.moved_count,
    }
