"""Rows of the live-state pool: one per running request."""

from __future__ import annotations

import heapq
from typing import NewType

RowId = NewType("RowId", int)


class RowPool:
    """Hands out rows 0 .. total - 1, the lowest first: rows in use stay close together."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = [RowId(row) for row in range(total)]  # a heap

    @property
    def free_count(self) -> int:
        """Rows that `take` can hand out."""
        return len(self._free)

    def take(self) -> RowId:
        """A free row; the planner has made sure that there is one."""
        assert self._free, "no free row"
        return heapq.heappop(self._free)

    def give_back(self, row: RowId) -> None:
        """The row's owner has left."""
        assert row not in self._free, f"row {row} given back twice"
        heapq.heappush(self._free, row)

    def check(self, owned: list[RowId]) -> None:
        """Assert that free rows and `owned` ones make up the pool, each exactly once."""
        assert sorted([*self._free, *owned]) == list(range(self.total)), (self._free, owned)
