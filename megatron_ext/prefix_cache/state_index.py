"""Which snapshot of recurrent states is in which slot, and which slot is given up next."""

from __future__ import annotations

from collections.abc import Iterable, KeysView
from typing import NewType, Protocol

from megatron_ext.prefix_cache.hash_chain import BlockHash
from megatron_ext.prefix_cache.opportunistic import OpportunisticFirst, OpportunisticUse
from megatron_ext.prefix_cache.snapshot_order import MAY_TAKE, LruSnapshots, Rank, SnapshotOrder

SlotId = NewType("SlotId", int)


class WantedSnapshot(Protocol):
    """A snapshot that is to be taken; see `StateIndex.reserve`."""

    @property
    def block_hash(self) -> BlockHash:
        """Its key."""

    @property
    def rank(self) -> Rank:
        """Whose slots it may take, and how early it goes."""

    @property
    def instead_of(self) -> BlockHash | None:
        """An optional one that is worth less."""


class SnapshotListener(Protocol):
    """Who is told what becomes of snapshots."""

    def on_snapshot_stored(self, block_hash: BlockHash) -> None:
        """It can be found."""

    def on_snapshot_removed(self, block_hash: BlockHash) -> None:
        """It has left its slot, for whatever reason."""

    def on_snapshot_displaced(self, block_hash: BlockHash) -> None:
        """It has left its slot to another one, or found none."""

    def on_snapshot_replaced(self, block_hash: BlockHash) -> None:
        """If nobody has consumed it, wherever it is, the next one of its request stands for it."""


class StateIndex:
    """Slots of the snapshot pool; a snapshot's key is the hash of the block that it stands at the end of.

    A slot is free, *reserved* (a step in flight is writing it, nobody can find it) or *visible*. Which visible one is
    given up first its order says: unless told otherwise the one consumed longest ago (HY-5). A restore copies its slot
    before the step's forward writes any, so a slot can be given up as soon as it is consumed.

    Snapshots taken in decode are *optional* until somebody consumes them: they take free slots and each other's only,
    and give theirs up before any other, so that they never cost a snapshot of prefill. *Opportunistic* ones, which
    nobody asked for, take free slots only, and give theirs up before even those; see `opportunistic.py`. Numbers of
    snapshots that were taken, are there, or were given up do not count them, as long as nobody has consumed them: they
    have their own (`opportunistic`).

    Args:
        total: Slots: 0 .. total - 1, until some are exchanged for others.
        order: Of the visible ones that are not opportunistic; empty.
        listener: Told of each that comes and goes.
    """

    def __init__(
        self, total: int, order: SnapshotOrder | None = None, listener: SnapshotListener | None = None
    ) -> None:
        self.total = total
        self.slots = set(map(SlotId, range(total)))
        self._listener = listener
        self._order = OpportunisticFirst(LruSnapshots() if order is None else order)
        self._free = sorted(self.slots, reverse=True)
        self._visible: dict[BlockHash, SlotId] = {}
        self._reserved: dict[BlockHash, tuple[SlotId, Rank]] = {}
        self.taken = 0
        self.skipped = 0
        self.evicted = 0  # for want of a slot
        self.replaced = 0  # by the next one of the same request
        self.opportunistic = OpportunisticUse()

    @property
    def used_count(self) -> int:
        """Slots with a visible snapshot that is not opportunistic."""
        return len(self._visible) - self._order.opportunistic_count

    @property
    def used_provisional_count(self) -> int:
        """Slots with a visible snapshot that is opportunistic."""
        return self._order.opportunistic_count

    @property
    def opportunistic_count(self) -> int:
        """Slots with a opportunistic snapshot, written or being written."""
        being_written = sum(rank is Rank.OPPORTUNISTIC for _, rank in self._reserved.values())
        return self.used_provisional_count + being_written

    @property
    def free_count(self) -> int:
        """Slots with nothing in them."""
        return len(self._free)

    @property
    def obtainable_count(self) -> int:
        """Slots that `reserve` can hand out one after the other, for snapshots that are not optional."""
        return self.total - len(self._reserved)

    def find(self, block_hash: BlockHash) -> SlotId | None:
        """The slot of the visible snapshot of `block_hash`, or None."""
        return self._visible.get(block_hash)

    def visible(self) -> KeysView[BlockHash]:
        """The snapshots that can be found."""
        return self._visible.keys()

    def is_reserved(self, block_hash: BlockHash) -> bool:
        """Whether a snapshot of `block_hash` is being taken."""
        return block_hash in self._reserved

    def is_provisional(self, block_hash: BlockHash) -> bool:
        """Whether a snapshot of `block_hash` is there, and nobody has asked for it or consumed it."""
        return self._order.rank(block_hash) is Rank.OPPORTUNISTIC

    def consume(self, block_hash: BlockHash) -> None:
        """A request resumes from the visible snapshot of `block_hash`."""
        self.opportunistic.consumed += self.is_provisional(block_hash)
        self._order.use(block_hash)

    def reserve(
        self, block_hash: BlockHash, rank: Rank = Rank.ORDINARY, *, instead_of: BlockHash | None = None
    ) -> SlotId | None:
        """A slot to write the snapshot of `block_hash` to, given up by another one if none is free.

        Args:
            block hash: Not reserved, and not visible, unless as a opportunistic one, which this one replaces.
            rank: Says whose slots it may take.
            instead_of: An optional snapshot that is worth less than this one; it gives up its slot even if one is free.

        Returns:
            None if no slot can be had, which is counted unless it is opportunistic.
        """
        if rank is not Rank.OPPORTUNISTIC and self.is_provisional(block_hash):
            self.drop(block_hash)
        assert block_hash not in self._visible, "this snapshot is there already"
        assert block_hash not in self._reserved, "this snapshot is being taken already"
        if instead_of is not None and self._listener is not None:
            self._listener.on_snapshot_replaced(instead_of)
        if instead_of is not None and self._order.rank(instead_of) is Rank.OPTIONAL:
            self.drop(instead_of)
            self.replaced += 1
        if not self._free and not self._free_one(rank):
            if rank is not Rank.OPPORTUNISTIC:
                self.skipped += 1
                self._tell_wanted(block_hash)
            return None
        slot = self._free.pop()
        self._reserved[block_hash] = (slot, rank)
        return slot

    def _free_one(self, rank: Rank) -> bool:
        """Let a snapshot give up its slot to one of `rank`; whether there is one that has to."""
        opportunistic = self._order.opportunistic_count
        victim = self._order.evict(MAY_TAKE[rank])
        if victim is None:
            return False
        self._leave(victim)
        if self._order.opportunistic_count < opportunistic:  # it was never more than a guess
            self.opportunistic.given_up += 1
        else:
            self._tell_wanted(victim)
            self.evicted += 1
        return True

    def reserve_all(self, wanted: Iterable[WantedSnapshot]) -> list[SlotId | None]:
        """Slots for a step's snapshots, all in one transition (HY-5): earlier ones have the first choice.

        Returns:
            A slot for each; None for one that is there or being taken already, and for one that finds none. What is
            there as a opportunistic one only is taken again where it is asked for.
        """
        return [
            None if self._is_there(one) else self.reserve(one.block_hash, one.rank, instead_of=one.instead_of)
            for one in wanted
        ]

    def _is_there(self, one: WantedSnapshot) -> bool:
        is_enough = one.rank is Rank.OPPORTUNISTIC or not self.is_provisional(one.block_hash)
        return one.block_hash in self._reserved or (one.block_hash in self._visible and is_enough)

    def commit(self, block_hash: BlockHash) -> None:
        """The reserved snapshot of `block_hash` has been written: let others find it."""
        self._visible[block_hash], rank = self._reserved.pop(block_hash)
        self._order.add(block_hash, rank)
        if rank is Rank.OPPORTUNISTIC:
            self.opportunistic.taken += 1
        else:
            self.taken += 1
        if self._listener is not None:
            self._listener.on_snapshot_stored(block_hash)

    def exchange(self, block_hash: BlockHash, slot: SlotId) -> SlotId:
        """The reserved snapshot of `block_hash` lies in a slot that is none of these: from now on it is one of them.

        Returns:
            The slot that was reserved for it, which is none of these any more.
        """
        assert slot not in self.slots, f"slot {slot} is here already"
        reserved, rank = self._reserved[block_hash]
        self._reserved[block_hash] = (slot, rank)
        self.slots.remove(reserved)
        self.slots.add(slot)
        return reserved

    def cancel(self, block_hash: BlockHash) -> None:
        """The reserved snapshot of `block_hash` will not be written."""
        slot, _ = self._reserved.pop(block_hash)
        self._free.append(slot)

    def drop(self, block_hash: BlockHash) -> None:
        """The block that `block_hash` names is not cached any more, so its snapshot, if there is one, is of no use."""
        if block_hash in self._visible:
            self.opportunistic.given_up += self.is_provisional(block_hash)
            self._order.remove(block_hash)
            self._leave(block_hash)

    def _leave(self, block_hash: BlockHash) -> None:
        self._free.append(self._visible.pop(block_hash))
        if self._listener is not None:
            self._listener.on_snapshot_removed(block_hash)

    def _tell_wanted(self, block_hash: BlockHash) -> None:
        if self._listener is not None:
            self._listener.on_snapshot_displaced(block_hash)

    def clear(self) -> None:
        """Forget everything; reserved slots too, whose writers must not commit."""
        self._free = sorted(self.slots, reverse=True)
        self._visible.clear()
        self.opportunistic.given_up += self._order.opportunistic_count
        self._order.clear()
        self._reserved.clear()

    def check(self, cached: Iterable[BlockHash]) -> None:
        """Assert that every slot is in one place, and that visible snapshots stand at the ends of `cached` blocks."""
        reserved = [slot for slot, _ in self._reserved.values()]
        assert sorted([*self._free, *self._visible.values(), *reserved]) == sorted(self.slots), "slots were lost"
        assert len(self.slots) == self.total, "slots were lost"
        assert not self._visible.keys() & self._reserved.keys(), "a visible snapshot is being taken again"
        assert sorted(self._order) == sorted(self._visible), "the order and the index disagree"
        self._order.check()
        use = self.opportunistic
        there = self._order.opportunistic_count
        assert use.taken == use.consumed + use.given_up + there, "a provisional snapshot was lost count of"
        assert self._visible.keys() <= set(cached), "a snapshot outlives its block"
