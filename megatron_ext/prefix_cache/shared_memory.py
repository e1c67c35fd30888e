"""One memory for blocks and snapshots: which cached contents go for what asks for a place.

The entry of lowest priority goes, block or snapshot; priorities of both are times of one clock, on which
snapshots age faster than blocks if fewer of them are used again (`reuse.py`). A block is freed where it lies. A slab is
made of free blocks by moving what lies between them, so no block is evicted for its place; a slab of free slots
likewise. Opportunistic snapshots go before anything else, then the optional ones of decode.

Requests that run make anything cached go. New requests leave some slabs of snapshots alone while others run
(`kept_for_snapshots`): they can wait, and would evict what lets them skip tokens.

Blocks were last used when their request ended. For a snapshot that is the end of the last request that resumed from it
or took it; while its block is in use, it is passed over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

from megatron_ext.prefix_cache.block_index import BlockIndex
from megatron_ext.prefix_cache.block_pool import BlockPool
from megatron_ext.prefix_cache.eviction import LeafFirstLru
from megatron_ext.prefix_cache.free_places import FreePlaces
from megatron_ext.prefix_cache.hash_chain import BlockHash
from megatron_ext.prefix_cache.reuse import Reuse
from megatron_ext.prefix_cache.slab_layout import SlabLayout
from megatron_ext.prefix_cache.slabs import Arena, StateCopy
from megatron_ext.prefix_cache.snapshot_order import MAY_TAKE, Rank, SnapshotOrder
from megatron_ext.prefix_cache.state_index import SlotId, SnapshotListener, StateIndex

KEPT_SHARE = 0.5  # of the slabs, times the share of snapshots that are used again
SECOND_CHANCES = 16  # snapshots with blocks in use that an eviction passes over; a bound on its time


class SharedMemory:
    """Arena of slabs, its pool of blocks and its index of snapshots, and evictions for whichever needs a place.

    Args:
        layout: Slabs of the arena.
        index: Index of the cached blocks.
        unused: Order of the evictable blocks.
        evict_blocks: Function that evicts up to a number of blocks with priorities up to a limit.
        clock: Times of uses of blocks and snapshots.
        listener: See `StateIndex`.
    """

    def __init__(
        self,
        layout: SlabLayout,
        index: BlockIndex,
        unused: LeafFirstLru,
        evict_blocks: Callable[[int, float], None],
        clock: Iterator[int],
        listener: SnapshotListener,
    ) -> None:
        self.arena = Arena(layout)
        self.pool = BlockPool(layout.blocks, self.arena.blocks)
        self.reuse = Reuse(layout)
        self.states = StateIndex(layout.snapshot_slots, SnapshotOrder(clock, self.reuse), listener, self)
        self._index, self._unused, self._evict_blocks = index, unused, evict_blocks
        self.arena.blocks.tables += [self.pool.follow_moves, index.follow_moves, unused.follow_moves]
        self.arena.slots.tables.append(self.states.follow_moves)

    @property
    def free_slots(self) -> FreePlaces[SlotId]:
        """Free slots, and those of free slabs."""
        return self.arena.slots

    @property
    def obtainable_from_blocks(self) -> int:
        """Number of slots that slabs of unused blocks would make room for."""
        layout = self.arena.layout
        return (self.arena.blocks.typed_count + len(self._unused)) // layout.blocks_per_slab * layout.snapshots_per_slab

    @property
    def obtainable_from_snapshots(self) -> int:
        """Number of blocks that slabs of snapshots would make room for; slabs that are written to are left out."""
        return self.arena.slots.unpinned_count * self.arena.layout.blocks_per_slab

    @property
    def occupied_by_snapshots(self) -> int:
        """Number of blocks that slabs of snapshots take the room of."""
        return self.arena.slots.slab_count * self.arena.layout.blocks_per_slab

    @property
    def kept_for_snapshots(self) -> int:
        """Number of `obtainable_from_snapshots` that new requests leave alone while others run."""
        slots, layout = self.arena.slots, self.arena.layout
        kept = int(KEPT_SHARE * self.reuse.of_snapshots * layout.slabs)
        pinned = slots.slab_count - slots.unpinned_count
        return min(slots.unpinned_count, max(0, kept - pinned)) * layout.blocks_per_slab

    def make_blocks(self, count: int) -> None:
        """Evict at most `count` blocks, or a snapshot, and free a slab of slots if there are enough."""
        priority = self._next_snapshot() if self.arena.slots.unpinned_count else math.inf
        if self._unused.next_priority() <= priority:
            self._evict_blocks(count, priority)
            return
        self.states.evict(MAY_TAKE[Rank.ORDINARY])
        slots = self.arena.slots
        if slots.typed_count >= slots.per_slab and slots.unpinned_count:  # so many slots are free, in several slabs
            slots.evacuate()

    def make_slot(self) -> bool:
        """Free a slot by evicting the entry of lowest priority, or several blocks; return False if all is in use."""
        per_slab = self.arena.layout.blocks_per_slab
        while not len(self.arena.slots):
            free = self.arena.blocks.typed_count
            priority = self._next_snapshot()
            if free >= per_slab and priority > -math.inf:
                self.arena.blocks.evacuate()
            elif free + len(self._unused) >= per_slab and self._unused.next_priority() <= priority:
                self._evict_blocks(per_slab - free, priority)
            elif not self.states.evict(MAY_TAKE[Rank.ORDINARY]):
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
        block = self._index.find(block_hash)
        assert block is not None, "a snapshot outlives its block"
        return self.pool.references(block) > 0

    def pin(self, slot: SlotId) -> None:
        """Note that a slot is reserved, so that its slab keeps its type."""
        self.arena.slots.pin(slot)

    def unpin(self, slot: SlotId) -> None:
        """Note that a slot is no longer reserved."""
        self.arena.slots.unpin(slot)

    def on_snapshot_stored(self, block_hash: BlockHash) -> None:
        """Count an ordinary snapshot that has become visible."""
        self.reuse.on_snapshot_stored(block_hash)

    def copy_states(self, block_hash: BlockHash, source: SlotId, slot: SlotId) -> None:
        """Note that states are to be copied to the slot of their snapshot."""
        self.arena.copy_states(StateCopy(block_hash, source, slot))

    def check(self, cached: Iterable[BlockHash]) -> None:
        """Assert that slabs, pool and index of snapshots agree."""
        arena = self.arena
        arena.check()
        self.reuse.check()
        self.pool.check([block for slab in arena.slots.slabs() for block in arena.blocks.places(slab)])
        whole = [slab for slab in arena.blocks.slabs() if slab < arena.layout.slabs]
        self.states.check(cached, [slot for slab in whole for slot in arena.slots.places(slab)])
        assert arena.slots.pinned_places == self.states.reserved_count, "other slabs are pinned than those written to"
