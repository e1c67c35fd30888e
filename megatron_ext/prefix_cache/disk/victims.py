"""Order in which the store evicts: entries of other identities first, then least recently used entries."""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from megatron_ext.prefix_cache.disk.entry import StoredEntry

MIN_HEAP = 64  # places below which old ones are left


class Victim(NamedTuple):
    """Place of an entry in the order."""

    is_own: bool
    order: tuple[float, int]
    row_id: int


class VictimOrder:
    """Heap of entries; entries that are gone or have moved since are skipped.

    Args:
        entries: Entries of the store by row, as the store changes them.
        identity: Identity whose entries are evicted last.
    """

    def __init__(self, entries: Mapping[int, StoredEntry], identity: bytes) -> None:
        self._entries = entries
        self._identity = identity
        self._heap: list[Victim] = []

    def place(self, entry: StoredEntry) -> Victim:
        """Return the place of an entry in the order."""
        return Victim(entry.identity == self._identity, entry.order, entry.row_id)

    def add(self, entry: StoredEntry) -> None:
        """Add an entry of the store, or give it another place; old places are dropped once they are the most."""
        heappush(self._heap, self.place(entry))
        if len(self._heap) > 2 * len(self._entries) + MIN_HEAP:
            self._heap = [self.place(one) for one in self._entries.values()]
            heapify(self._heap)

    def take(self, pages: int, enough: int, before: StoredEntry) -> list[StoredEntry]:
        """Remove and return the first entries that together have the needed pages.

        Args:
            pages: Number of pages needed.
            enough: Pages after which no more entries are taken, at least `pages`.
            before: Entry to make room for; only entries before it in the order are taken.

        Returns:
            The entries; none, and none is removed, if the entries before `before` have too few pages.
        """
        limit, found = self.place(before), 0
        chosen: list[StoredEntry] = []
        while found < enough and self._heap and self._heap[0] < limit:
            victim = heappop(self._heap)
            entry = self._entries.get(victim.row_id)
            if entry is not None and self.place(entry) == victim:
                chosen.append(entry)
                found += sum(extent.pages for extent in entry.extents)
        if found >= pages:
            return chosen
        for entry in chosen:
            self.add(entry)
        return []
