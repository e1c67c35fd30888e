"""Allocation of pages in a data file: an entry gets runs of pages, from the lowest free ones on."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import NamedTuple

PAGE_BYTES = 4096


class Extent(NamedTuple):
    """Run of adjacent pages."""

    start: int
    pages: int

    @property
    def end(self) -> int:
        """First page after the run."""
        return self.start + self.pages


def pages_of(size: int) -> int:
    """Return the number of pages that `size` bytes take; at least one, which bounds entries without bytes, too."""
    return max(1, -(-size // PAGE_BYTES))


class FreePages:
    """Free pages of a file, as runs in order of their position; adjacent runs are joined when they are taken.

    Args:
        total: Pages of the file.
        used: Runs that are in use, which do not overlap.
    """

    def __init__(self, total: int, used: Iterable[Extent]) -> None:
        self.total = total
        ordered = sorted(used)
        ends = [0, *(extent.end for extent in ordered)]
        starts = [*(extent.start for extent in ordered), total]
        assert all(one.end <= other.start for one, other in pairwise(ordered)), "a page is in use twice"
        self._free = [Extent(end, start - end) for end, start in zip(ends, starts, strict=True) if end < start]
        heapify(self._free)
        self.count = sum(extent.pages for extent in self._free)

    def take(self, count: int) -> tuple[Extent, ...]:
        """Remove and return `count` free pages."""
        assert count <= self.count, f"{count} pages asked, {self.count} free"
        self.count -= count
        taken: list[Extent] = []
        while count:
            extent = heappop(self._free)
            if extent.pages > count:
                heappush(self._free, Extent(extent.start + count, extent.pages - count))
                extent = Extent(extent.start, count)
            count -= extent.pages
            if taken and taken[-1].end == extent.start:
                extent = Extent(taken[-1].start, taken.pop().pages + extent.pages)
            taken.append(extent)
        return tuple(taken)

    def give(self, extents: Iterable[Extent]) -> None:
        """Add runs that are free now."""
        for extent in extents:
            heappush(self._free, extent)
            self.count += extent.pages

    def check(self, used: Iterable[Extent]) -> None:
        """Assert that free and used runs make up the file."""
        end = 0
        for extent in sorted([*self._free, *used]):
            assert extent.start == end, f"page {end} is lost or in use twice"
            end = extent.end
        assert end == self.total, "pages are lost at the end"
        assert self.count == sum(extent.pages for extent in self._free), "free pages miscounted"
