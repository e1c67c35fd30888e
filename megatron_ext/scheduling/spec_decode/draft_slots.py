"""Slots for the states behind drafts, until it is known which of these come (SP-2)."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable

from megatron_ext.prefix_cache.hash_chain import BlockHash
from megatron_ext.prefix_cache.state_index import SlotId

_NAME_BYTES = 8  # less than a block hash has: nobody takes one for the other


class DraftSlots:
    """Rows of the snapshots' pool behind those that the index of snapshots begins with; lent for a step or two.

    A state that turns out to be worth a snapshot stays where it is: the index takes its slot, and gives another one
    for it (`StateIndex.exchange`). So which rows are here changes, and how many does not.

    Args:
        first: The first row.
        total: Rows.
    """

    def __init__(self, first: int, total: int) -> None:
        self._free = [SlotId(slot) for slot in range(first, first + total)]  # a heap
        self._total = total
        self._names = itertools.count()

    @property
    def free_count(self) -> int:
        """Slots that `take` can hand out."""
        return len(self._free)

    def take(self) -> SlotId:
        """A free slot; the planner has made sure that there is one."""
        assert self._free, "no free slot"
        return heapq.heappop(self._free)

    def name(self) -> BlockHash:
        """Of a state that is nobody's snapshot: never one of another."""
        return BlockHash(next(self._names).to_bytes(_NAME_BYTES, "little"))

    @staticmethod
    def is_name(block_hash: BlockHash) -> bool:
        """Whether this is such a name, and not the hash of a block."""
        return len(block_hash) == _NAME_BYTES

    def give_back(self, slots: Iterable[SlotId]) -> None:
        """Their owner does not need them any more."""
        for slot in slots:
            heapq.heappush(self._free, slot)

    def check(self, owned: list[SlotId], others: Iterable[SlotId]) -> None:
        """Assert that free slots and `owned` ones are all of these, each once, and none of the snapshots' own."""
        here = [*self._free, *owned]
        assert len(set(here)) == len(here) == self._total, (self._free, owned)
        assert not set(here) & set(others), "a slot is lent and the index's"
