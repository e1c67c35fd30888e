"""One memory for blocks and snapshots: which cached contents go for what asks for a place.

The entry of lowest priority goes, block or snapshot; priorities of both are times of one clock, on which
snapshots age faster than blocks if fewer of them are used again (`reuse.py`). A snapshot that goes frees its slab, a
block the place where it lies. A slab is made of free blocks by moving what lies between them, so no block is evicted
for its place. Opportunistic snapshots go before anything else, then the optional ones of decode.

Requests that run make anything cached go. New requests leave some slabs of snapshots alone while others run
(`kept_for_snapshots`): they can wait, and would evict what lets them skip tokens.

Blocks were last used when their request ended. For a snapshot that is the end of the last request that resumed from it
or took it; while its block is in use, it is passed over.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from megatron_ext.prefix_cache.block_pool import BlockPool
from megatron_ext.prefix_cache.hash_chain import BlockHash
from megatron_ext.prefix_cache.reuse import Reuse
from megatron_ext.prefix_cache.slab_layout import SlabLayout
from megatron_ext.prefix_cache.slabs import Arena, StateCopy
from megatron_ext.prefix_cache.snapshot_order import MAY_TAKE, Rank, SnapshotOrder
from megatron_ext.prefix_cache.state_index import SlotId, StateIndex

if TYPE_CHECKING:
    from megatron_ext.prefix_cache.cache import PrefixCache

KEPT_SHARE = 0.5  # of the slabs, times the share of snapshots that are used again
SECOND_CHANCES = 16  # snapshots with blocks in use that an eviction passes over; a bound on its time


class SharedMemory:
    """Arena of slabs, its pool of blocks and its index of snapshots, and evictions for whichever needs a place.

    Args:
        layout: Slabs of the arena.
        cache: Cache that has its contents there, with its index and its order of evictable blocks.
        clock: Times of uses of blocks and snapshots.
    """

    def __init__(self, layout: SlabLayout, cache: PrefixCache, clock: Iterator[int]) -> None:
        self.arena = Arena(layout)
        self.pool = BlockPool(layout.blocks, self.arena.blocks)
        self.reuse = Reuse(layout)
        self.states = StateIndex(layout.slabs, cache, SnapshotOrder(clock, self.reuse), self)
        self._cache, self._unused = cache, cache.unused
        self.arena.blocks.tables += [self.pool.follow_moves, cache.index.follow_moves, cache.unused.follow_moves]

    @property
    def obtainable_from_blocks(self) -> int:
        """Number of slots that slabs of unused blocks would make room for."""
        return (self.arena.blocks.typed_count + len(self._unused)) // self.arena.layout.blocks_per_slab

    @property
    def obtainable_from_snapshots(self) -> int:
        """Number of blocks that slabs of snapshots would make room for; slabs that are written to are left out."""
        return len(self.states.visible()) * self.arena.layout.blocks_per_slab

    @property
    def kept_for_snapshots(self) -> int:
        """Number of `obtainable_from_snapshots` that new requests leave alone while others run."""
        layout = self.arena.layout
        kept = int(KEPT_SHARE * self.reuse.of_snapshots * layout.slabs)
        return min(len(self.states.visible()), max(0, kept - self.states.reserved_count)) * layout.blocks_per_slab

    def make_blocks(self, count: int) -> None:
        """Evict at most `count` blocks, or a snapshot."""
        priority = self._next_snapshot()
        if self._unused.next_priority() > priority or not self._cache.evict(count, priority):
            self.states.evict(MAY_TAKE[Rank.ORDINARY])

    def make_slot(self) -> bool:
        """Free a slot by evicting the entry of lowest priority, or several blocks; return False if all is in use."""
        per_slab = self.arena.layout.blocks_per_slab
        while not len(self.arena):
            free = self.arena.blocks.typed_count
            priority = self._next_snapshot()
            if free >= per_slab and priority > -math.inf:
                self.arena.blocks.evacuate()
                continue
            has_blocks = free + len(self._unused) >= per_slab and self._unused.next_priority() <= priority
            if has_blocks and self._cache.evict(per_slab - free, priority):
                continue
            if not self.states.evict(MAY_TAKE[Rank.ORDINARY]):
                return False
        return True

    def _next_snapshot(self) -> float:
        """Return the priority of the next snapshot to evict, after ordinary ones whose blocks are in use."""
        for _ in range(SECOND_CHANCES):
            priority, block_hash = self.states.next_victim()
            if block_hash is None or priority == -math.inf or not self._is_in_use(block_hash):
                break
            self.states.touch(block_hash)
        return priority

    def _is_in_use(self, block_hash: BlockHash) -> bool:
        block = self._cache.index.find(block_hash)
        assert block is not None, "a snapshot outlives its block"
        return self.pool.references(block) > 0

    def copy_states(self, block_hash: BlockHash, source: SlotId, slot: SlotId) -> None:
        """Note that states are to be copied to the slot of their snapshot."""
        self.arena.state_copies[slot] = StateCopy(block_hash, source, slot)

    def check(self, cached: Iterable[BlockHash]) -> None:
        """Assert that slabs, pool and index of snapshots agree."""
        arena = self.arena
        arena.check()
        self.reuse.check()
        others = set(range(arena.layout.slabs)).difference(arena, arena.blocks.slabs)
        self.pool.check(self._unused, [block for slab in others for block in arena.blocks.places(slab)])
        self.states.check(cached, list(map(SlotId, arena.blocks.slabs)))
