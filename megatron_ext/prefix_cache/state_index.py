"""Which snapshot of recurrent states is in which slot, and which slot is given up next."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import NewType

from megatron_ext.prefix_cache.hash_chain import Digest

SlotId = NewType("SlotId", int)


class StateIndex:
    """Slots of the snapshot pool; a snapshot's key is the digest of the block that it stands at the end of.

    A slot is free, *reserved* (a step in flight is writing it, nobody can find it) or *visible*. The visible one that
    was consumed longest ago is given up first; one that was never consumed counts from when it became visible (HY-5).
    A restore copies its slot before the step's forward writes any, so a slot can be given up as soon as it is consumed.

    Snapshots taken in decode are *optional* until somebody consumes them: they take free slots and each other's only,
    and give theirs up before any other, so that they never cost a snapshot of prefill.

    Args:
        total: Slots.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = [SlotId(slot) for slot in reversed(range(total))]
        self._visible: OrderedDict[Digest, SlotId] = OrderedDict()  # the next to be given up first
        self._optional: OrderedDict[Digest, None] = OrderedDict()  # those of the visible ones, in the same order
        self._reserved: dict[Digest, tuple[SlotId, bool]] = {}  # and whether it is optional
        self.taken = 0
        self.skipped = 0
        self.evicted = 0  # for want of a slot
        self.replaced = 0  # by the next one of the same request

    @property
    def used_count(self) -> int:
        """Slots with a visible snapshot."""
        return len(self._visible)

    @property
    def obtainable_count(self) -> int:
        """Slots that `reserve` can hand out one after the other, for snapshots that are not optional."""
        return self.total - len(self._reserved)

    def find(self, digest: Digest) -> SlotId | None:
        """The slot of the visible snapshot of `digest`, or None."""
        return self._visible.get(digest)

    def is_reserved(self, digest: Digest) -> bool:
        """Whether a snapshot of `digest` is being taken."""
        return digest in self._reserved

    def consume(self, digest: Digest) -> None:
        """A request resumes from the visible snapshot of `digest`."""
        self._visible.move_to_end(digest)
        self._optional.pop(digest, None)

    def reserve(self, digest: Digest, *, is_optional: bool = False, instead_of: Digest | None = None) -> SlotId | None:
        """A slot to write the snapshot of `digest` to, given up by another one if none is free.

        Args:
            digest: Neither visible nor reserved.
            is_optional: Do without rather than take the slot of one that is not optional.
            instead_of: An optional snapshot that is worth less than this one; it gives up its slot even if one is free.

        Returns:
            None, and a count of it, if no slot can be had.
        """
        assert digest not in self._visible, "this snapshot is there already"
        assert digest not in self._reserved, "this snapshot is being taken already"
        if instead_of is not None and instead_of in self._optional:
            self._give_up(instead_of)
            self.replaced += 1
        if not self._free:
            victims = self._optional or ({} if is_optional else self._visible)
            if not victims:
                self.skipped += 1
                return None
            self._give_up(next(iter(victims)))
            self.evicted += 1
        slot = self._free.pop()
        self._reserved[digest] = (slot, is_optional)
        return slot

    def commit(self, digest: Digest) -> None:
        """The reserved snapshot of `digest` has been written: let others find it."""
        slot, is_optional = self._reserved.pop(digest)
        self._visible[digest] = slot
        if is_optional:
            self._optional[digest] = None
        self.taken += 1

    def cancel(self, digest: Digest) -> None:
        """The reserved snapshot of `digest` will not be written."""
        slot, _ = self._reserved.pop(digest)
        self._free.append(slot)

    def drop(self, digest: Digest) -> None:
        """The block that `digest` names is not cached any more, so its snapshot, if there is one, is of no use."""
        if digest in self._visible:
            self._give_up(digest)

    def _give_up(self, digest: Digest) -> None:
        self._free.append(self._visible.pop(digest))
        self._optional.pop(digest, None)

    def clear(self) -> None:
        """Forget everything; reserved slots too, whose writers must not commit."""
        self._free = [SlotId(slot) for slot in reversed(range(self.total))]
        self._visible.clear()
        self._optional.clear()
        self._reserved.clear()

    def check(self, cached: Iterable[Digest]) -> None:
        """Assert that every slot is in one place, and that visible snapshots stand at the ends of `cached` blocks."""
        reserved = [slot for slot, _ in self._reserved.values()]
        assert sorted([*self._free, *self._visible.values(), *reserved]) == list(range(self.total)), "slots were lost"
        assert not self._visible.keys() & self._reserved.keys(), "a visible snapshot is being taken again"
        assert [digest for digest in self._visible if digest in self._optional] == list(self._optional)
        assert self._visible.keys() <= set(cached), "a snapshot outlives its block"
