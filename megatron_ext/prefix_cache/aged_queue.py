"""Priority queue with a numeric key for each item, the smallest first; among equal keys the oldest first."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)

_SPARE = 64  # stale entries that a heap may have before it is rebuilt


class AgedQueue(Generic[Item]):
    """Heap whose items can be moved and removed; every operation takes O(log n), amortized.

    Stale entries of an item stay in the heap until they come up, or until half of the heap is stale.
    """

    def __init__(self) -> None:
        self._places: dict[Item, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, Item]] = []
        self._serial = count()

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, item: Item) -> bool:
        return item in self._places

    def __iter__(self) -> Iterator[Item]:
        return iter(self._places)

    def put(self, item: Item, key: float) -> None:
        """Insert `item` at `key`, or move it there."""
        self._put_at(item, (key, next(self._serial)))

    def _put_at(self, item: Item, place: tuple[float, int]) -> None:
        self._places[item] = place
        heappush(self._heap, (*place, item))
        self._tidy()

    def _tidy(self) -> None:
        """Rebuild the heap if more than half of it is stale."""
        if len(self._heap) > 2 * len(self._places) + _SPARE:
            self._heap = [(*place, item) for item, place in self._places.items()]
            heapify(self._heap)

    def discard(self, item: Item) -> None:
        """Remove `item` if it is in the queue."""
        self._places.pop(item, None)
        self._tidy()

    def rename(self, old: Item, new: Item) -> None:
        """Put `new` in the place of `old`."""
        self._put_at(new, self._places.pop(old))

    def pop(self, key_now: Callable[[Item], float] | None = None) -> tuple[Item, float]:
        """Remove and return the item with the smallest key, and that key; see `first`."""
        item, key = self.first(key_now)
        heappop(self._heap)
        del self._places[item]
        self._tidy()
        return item, key

    def first(self, key_now: Callable[[Item], float] | None = None) -> tuple[Item, float]:
        """Return the item with the smallest key, and that key.

        Args:
            key_now: Function that returns an item's current key, for keys that may have grown since `put`; called only
                for items that come up. None if keys do not change.
        """
        assert self._places, "nothing is in line"
        while True:
            key, serial, item = self._heap[0]
            if self._places.get(item) != (key, serial):
                heappop(self._heap)
                continue
            now = key if key_now is None else key_now(item)
            if now <= key:
                return item, key
            heappop(self._heap)
            self.put(item, now)

    def clear(self) -> None:
        """Remove all items."""
        self._places.clear()
        self._heap.clear()

    def check(self) -> None:
        """Assert that every item is in the heap, and that the heap has few stale entries."""
        assert {(*place, item) for item, place in self._places.items()} <= set(self._heap), "an item has no place"
        assert len(self._heap) <= 2 * len(self._places) + _SPARE, "stale places pile up"
