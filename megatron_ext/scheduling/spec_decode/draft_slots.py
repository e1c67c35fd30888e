"""Slots for the states after drafts, until acceptance is known (SP-2)."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable

from megatron_ext.prefix_cache.hash_chain import BlockHash
from megatron_ext.prefix_cache.state_index import SlotId

_NAME_BYTES = 8  # shorter than a block hash, so that the two cannot be confused


class DraftSlots:
    """Rows of the snapshot pool after the snapshot index's initial rows; reserved for a step or two.

    A state that becomes a snapshot stays in place: the index takes its slot and gives another one in exchange
    (`StateIndex.exchange`). So the set of rows changes, and their number does not.

    Args:
        first: Index of the first row.
        total: Number of rows.
    """

    def __init__(self, first: int, total: int) -> None:
        self._free = [SlotId(slot) for slot in range(first, first + total)]  # a heap
        self._total = total
        self._names = itertools.count()

    @property
    def free_count(self) -> int:
        """Number of slots that `take` can return."""
        return len(self._free)

    def take(self) -> SlotId:
        """Return a free slot; the planner has made sure that there is one."""
        assert self._free, "no free slot"
        return heapq.heappop(self._free)

    def name(self) -> BlockHash:
        """Return a unique name for a state that is not a snapshot of the index."""
        return BlockHash(next(self._names).to_bytes(_NAME_BYTES, "little"))

    @staticmethod
    def is_name(block_hash: BlockHash) -> bool:
        """Return whether this is such a name rather than a block hash."""
        return len(block_hash) == _NAME_BYTES

    def give_back(self, slots: Iterable[SlotId]) -> None:
        """Return slots that are not needed any more."""
        for slot in slots:
            heapq.heappush(self._free, slot)

    def check(self, owned: list[SlotId], others: Iterable[SlotId]) -> None:
        """Assert that free and `owned` slots are all of these, each once, and that none belongs to the index."""
        here = [*self._free, *owned]
        assert len(set(here)) == len(here) == self._total, (self._free, owned)
        assert not set(here) & set(others), "a slot is lent and the index's"
