"""Running state slots: one per running request."""

from __future__ import annotations

import heapq
from typing import NewType

RunningSlot = NewType("RunningSlot", int)


class RunningSlots:
    """Allocator of slots 0 .. total - 1, the lowest first, so that slots in use stay close together."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = [RunningSlot(slot) for slot in range(total)]  # a heap

    @property
    def free_count(self) -> int:
        """Number of slots that `take` can return."""
        return len(self._free)

    def take(self) -> RunningSlot:
        """Return a free slot; the planner has made sure that there is one."""
        assert self._free, "no free slot"
        return heapq.heappop(self._free)

    def give_back(self, slot: RunningSlot) -> None:
        """Return the slot of a request that has left."""
        assert slot not in self._free, f"slot {slot} given back twice"
        heapq.heappush(self._free, slot)

    def check(self, owned: list[RunningSlot]) -> None:
        """Assert that free slots and `owned` ones make up the pool, each exactly once."""
        assert sorted([*self._free, *owned]) == list(range(self.total)), (self._free, owned)
