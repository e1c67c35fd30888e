"""Index of the snapshots of recurrent states by slot, with their order of eviction."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, KeysView, Sequence
from typing import TYPE_CHECKING, NewType

from megatron_ext.prefix_cache.block_pool import FreePlaces, Stack
from megatron_ext.prefix_cache.hash_chain import BlockHash
from megatron_ext.prefix_cache.snapshot_order import MAY_TAKE, Rank, SnapshotOrder

if TYPE_CHECKING:  # both own an index
    from megatron_ext.prefix_cache.cache import PrefixCache
    from megatron_ext.prefix_cache.shared_memory import SharedMemory

SPARED_PRIORITY = 2**62  # of snapshots: after all blocks that are not in use

SlotId = NewType("SlotId", int)


class StateIndex:
    """Slots of the snapshot pool; a snapshot's key is the hash of the block at whose end it was taken.

    A slot is free, *reserved* (an in-flight step is writing it, and no request can find it) or *visible*. `order`
    decides which visible snapshot is evicted first: the one consumed longest ago (HY-5). A restore copies its slot
    before the step's forward writes any, so a slot can be given up as soon as it is consumed.

    Snapshots taken in decode are *optional* until a request consumes them: they take only free slots and each other's,
    and are evicted before any other, so that they never cost a snapshot of prefill. *Opportunistic* snapshots, which
    no request asked for, are left by a long prefill on its way, in case another request diverges from it there (SI-1).
    They take free slots only, and are evicted before even those. The counts of snapshots taken, present and evicted
    leave them out until they are consumed; they have counts of their own (`provisional_taken` and so on).

    Args:
        total: Number of slots: 0 .. total - 1, until some are exchanged for others.
        listener: Cache that is told of each snapshot that is stored, removed, evicted, displaced or replaced.
        order: Empty eviction order.
        memory: Memory that the slots share with blocks: a slot is there only while it holds no blocks. None if all
            slots are always there.
    """

    def __init__(
        self, total: int, listener: PrefixCache, order: SnapshotOrder, memory: SharedMemory | None = None
    ) -> None:
        self.total = total
        self.slots = set(map(SlotId, range(total)))
        self._listener, self._order, self._memory = listener, order, memory
        self._free: FreePlaces[SlotId] = Stack(sorted(self.slots)) if memory is None else memory.arena
        self._visible: dict[BlockHash, SlotId] = {}
        self._reserved: dict[BlockHash, tuple[SlotId, Rank]] = {}
        self.is_spared: Callable[[BlockHash], bool] = lambda _: False  # goes after others; see `PrefixCache.spare`
        self.taken = 0
        self.skipped = 0
        self.evicted = 0  # for want of a slot
        self.replaced = 0  # by the next one of the same request
        self.provisional_taken = 0  # opportunistic ones that were written
        self.provisional_consumed = 0  # of these, resumed from by a request, which made them ordinary ones
        self.provisional_given_up = 0  # gone before: for their slot or a requested one, with their block, by a reset

    @property
    def used_count(self) -> int:
        """Slots with a visible snapshot that is not opportunistic."""
        return len(self._visible) - self.used_provisional_count

    @property
    def used_provisional_count(self) -> int:
        """Slots with a visible snapshot that is opportunistic."""
        return self._order.count(Rank.OPPORTUNISTIC)

    @property
    def opportunistic_count(self) -> int:
        """Slots with an opportunistic snapshot, written or being written."""
        being_written = sum(rank is Rank.OPPORTUNISTIC for _, rank in self._reserved.values())
        return self.used_provisional_count + being_written

    @property
    def free_count(self) -> int:
        """Number of empty slots."""
        return len(self._free)

    @property
    def reserved_count(self) -> int:
        """Number of slots that are being written."""
        return len(self._reserved)

    @property
    def obtainable_count(self) -> int:
        """Number of slots that `reserve` can hand out in a row, for snapshots that are not optional."""
        from_blocks = 0 if self._memory is None else self._memory.obtainable_from_blocks
        return len(self._free) + len(self._visible) + from_blocks

    def find(self, block_hash: BlockHash) -> SlotId | None:
        """Return the slot of the visible snapshot of `block_hash`, or None."""
        return self._visible.get(block_hash)

    def reserved_slot(self, block_hash: BlockHash) -> SlotId:
        """Return the slot of the snapshot of `block_hash`, which is being taken."""
        return self._reserved[block_hash][0]

    def among(self, block_hashes: Iterable[BlockHash]) -> list[BlockHash]:
        """Return the hashes that have a visible snapshot, in the given order."""
        visible = self._visible
        return [block_hash for block_hash in block_hashes if block_hash in visible]

    def visible(self) -> KeysView[BlockHash]:
        """Return the keys of the snapshots that can be found."""
        return self._visible.keys()

    def by_priority(self) -> list[BlockHash]:
        """Return the keys of the visible snapshots, the first to evict at the start."""
        return list(self._order)

    def is_reserved(self, block_hash: BlockHash) -> bool:
        """Return whether a snapshot of `block_hash` is being taken."""
        return block_hash in self._reserved

    def is_provisional(self, block_hash: BlockHash) -> bool:
        """Return whether `block_hash` has a visible opportunistic snapshot: not requested, and not consumed."""
        return self._order.rank(block_hash) is Rank.OPPORTUNISTIC

    def consume(self, block_hash: BlockHash) -> None:
        """Note that a request resumes from the visible snapshot of `block_hash`."""
        self.provisional_consumed += self.is_provisional(block_hash)
        self._order.use(block_hash)

    def reserve(
        self, block_hash: BlockHash, rank: Rank = Rank.ORDINARY, *, instead_of: BlockHash | None = None
    ) -> SlotId | None:
        """Reserve a slot for the snapshot of `block_hash`, evicting another snapshot if no slot is free.

        A requested snapshot that exists as an opportunistic one only is taken again.

        Args:
            block_hash: Key of the snapshot.
            rank: Rank of the snapshot, which decides whose slots it may take.
            instead_of: Optional snapshot of less worth; it is evicted even if a slot is free.

        Returns:
            The slot; None if the snapshot exists or is being taken already, or if no slot can be had, which is counted
            unless the snapshot is opportunistic.
        """
        is_enough = rank is Rank.OPPORTUNISTIC or not self.is_provisional(block_hash)
        if block_hash in self._reserved or (block_hash in self._visible and is_enough):
            return None
        self.drop(block_hash)
        if instead_of is not None:
            self._listener.on_snapshot_replaced(instead_of)
            if self._order.rank(instead_of) is Rank.OPTIONAL:
                self.drop(instead_of)
                self.replaced += 1
        if not len(self._free) and not self._make_room(rank):
            if rank is not Rank.OPPORTUNISTIC:
                self.skipped += 1
                self._listener.on_snapshot_displaced(block_hash)
            return None
        (slot,) = self._free.take(1)
        self._reserved[block_hash] = (slot, rank)
        return slot

    def _make_room(self, rank: Rank) -> bool:
        """Free a slot that a snapshot of `rank` may take; return whether there was one."""
        if self._memory is not None and rank is Rank.ORDINARY:
            return self._memory.make_slot()
        return self.evict(MAY_TAKE[rank])

    def next_victim(self) -> tuple[float, BlockHash | None]:
        """Return priority and key of the visible snapshot that is evicted next, whatever needs its slot.

        Optional and opportunistic snapshots have the lowest priority of all; infinity if there is no snapshot.
        """
        victim = self._order.oldest(MAY_TAKE[Rank.ORDINARY], self.is_spared)
        if victim is None:
            return math.inf, None
        return SPARED_PRIORITY if self.is_spared(victim) else self._order.priority(victim), victim

    def touch(self, block_hash: BlockHash) -> None:
        """Note that a request that resumed from a snapshot, or took it, has just ended or still runs."""
        if self._order.rank(block_hash) is Rank.ORDINARY:
            self._order.use(block_hash)

    def evict(self, ranks: Sequence[Rank]) -> bool:
        """Evict the next snapshot of the first of `ranks` that has any; return whether there was one."""
        victim = self._order.oldest(ranks, self.is_spared)
        if victim is None:
            return False
        if self.is_provisional(victim):
            self.drop(victim)
            return True
        self._order.remove(victim)
        self._listener.on_snapshot_evicted(victim)
        self._leave(victim)
        self._listener.on_snapshot_displaced(victim)
        self.evicted += 1
        return True

    def commit(self, block_hash: BlockHash, *, is_taken: bool = True) -> None:
        """Make the reserved snapshot of `block_hash`, which has been written, visible.

        Args:
            block_hash: Key of the snapshot.
            is_taken: Whether to count it as taken; False if it was taken by an earlier process.
        """
        slot, rank = self._reserved.pop(block_hash)
        self._visible[block_hash] = slot
        if self._memory is not None and rank is Rank.ORDINARY:
            self._memory.reuse.on_snapshot_stored(block_hash)
        self._order.add(block_hash, rank)
        if rank is Rank.OPPORTUNISTIC:
            self.provisional_taken += 1
        else:
            self.taken += is_taken
        self._listener.on_snapshot_stored(block_hash)

    def exchange(self, block_hash: BlockHash, slot: SlotId) -> SlotId:
        """Move the reserved snapshot of `block_hash` to `slot`, which joins the pool in place of the reserved one.

        In a shared memory the snapshot stays in the reserved slot, and its states are copied there with the next step.

        Returns:
            The slot that the pool does not need: the reserved slot, or `slot` in a shared memory.
        """
        assert slot not in self.slots, f"slot {slot} is here already"
        reserved, rank = self._reserved[block_hash]
        if self._memory is not None:
            self._memory.copy_states(block_hash, slot, reserved)
            return slot
        self._reserved[block_hash] = (slot, rank)
        self.slots.remove(reserved)
        self.slots.add(slot)
        return reserved

    def cancel(self, block_hash: BlockHash) -> None:
        """Free the slot of the reserved snapshot of `block_hash`, which will not be written."""
        slot, _ = self._reserved.pop(block_hash)
        self._free.give([slot])

    def drop(self, block_hash: BlockHash) -> None:
        """Drop the visible snapshot of `block_hash`, if any, which then does not count as evicted."""
        if block_hash in self._visible:
            self.provisional_given_up += self.is_provisional(block_hash)
            self._order.remove(block_hash)
            self._leave(block_hash)

    def _leave(self, block_hash: BlockHash) -> None:
        self._free.give([self._visible.pop(block_hash)])
        self._listener.on_snapshot_removed(block_hash)

    def clear(self) -> None:
        """Empty all slots, reserved ones too; their writers must not commit."""
        if self._memory is None:
            self._free = Stack(sorted(self.slots))
        else:
            self._free.give([*self._visible.values(), *(slot for slot, _ in self._reserved.values())])
        self._visible.clear()
        self.provisional_given_up += self.used_provisional_count
        self._order.clear()
        self._reserved.clear()

    def check(self, cached: Iterable[BlockHash], others: Sequence[SlotId] = ()) -> None:
        """Assert that every slot is in one place, and that visible snapshots are at the ends of `cached` blocks.

        Args:
            cached: Hashes of all cached blocks.
            others: Slots that are slabs of blocks.
        """
        reserved = [slot for slot, _ in self._reserved.values()]
        places = [*self._free, *self._visible.values(), *reserved, *others]
        assert sorted(places) == sorted(self.slots), "slots were lost"
        assert len(self.slots) == self.total, "slots were lost"
        assert not self._visible.keys() & self._reserved.keys(), "a visible snapshot is being taken again"
        assert sorted(self._order) == sorted(self._visible), "the order and the index disagree"
        self._order.check()
        gone = self.provisional_consumed + self.provisional_given_up
        assert self.provisional_taken == gone + self.used_provisional_count, "a provisional snapshot was lost count of"
        assert self._visible.keys() <= set(cached), "a snapshot outlives its block"
