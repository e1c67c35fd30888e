"""Data file of the store: allocation of its pages, reads and writes of an entry's bytes, spread over runs of pages."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
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
    """Free pages of a file, as runs in order of their position; the lowest are taken first, adjacent ones joined.

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


Buffer = bytes | bytearray | memoryview

GROWTH_BYTES = 64 * 1024**2  # by which the file grows at most
PARTS = 16  # of the limit: a small file grows by one of them


def checksum_of(buffers: Sequence[Buffer]) -> int:
    """Return the CRC-32 of the bytes of all buffers together."""
    found = 0
    for buffer in buffers:
        found = zlib.crc32(buffer, found)
    return found


class DataFile:
    """Pages of entries in one file, which grows in steps and gets its room from the file system before it is written.

    Args:
        handle: Handle of the file, for reading and writing.
        limit: Maximum number of pages.
    """

    def __init__(self, handle: int, limit: int) -> None:
        self._handle = handle
        self._limit = limit * PAGE_BYTES
        self._step = min(GROWTH_BYTES, -(-limit // PARTS) * PAGE_BYTES)
        self._size = os.fstat(handle).st_size

    @property
    def size(self) -> int:
        """Number of bytes that the file has now."""
        return self._size

    def shrink(self) -> None:
        """Cut the file down to its limit, if it is longer."""
        if self._size > self._limit:
            os.ftruncate(self._handle, self._limit)
            self._size = self._limit

    def clear(self) -> None:
        """Cut the file down to nothing."""
        os.ftruncate(self._handle, 0)
        self._size = 0

    def write(self, extents: Sequence[Extent], buffers: Sequence[Buffer]) -> None:
        """Write the bytes of an entry; they are on the medium after the next `sync` only.

        Raises:
            OSError: There is no room, or the device fails.
        """
        self._grow(max(extent.end for extent in extents) * PAGE_BYTES)
        for position, piece in _pieces(extents, buffers):
            self._put(position, piece)

    def _put(self, position: int, piece: memoryview) -> None:
        while piece:
            written = os.pwrite(self._handle, piece, position)
            position, piece = position + written, piece[written:]

    def _grow(self, end: int) -> None:
        if end > self._size:
            size = min(self._limit, -(-end // self._step) * self._step)
            os.posix_fallocate(self._handle, self._size, size - self._size)
            self._size = size

    def read(self, extents: Sequence[Extent], into: Sequence[Buffer]) -> bool:
        """Fill writable buffers with the bytes of an entry.

        Returns:
            False if the file is too short; then part of the buffers may have been filled.

        Raises:
            OSError: The device fails.
        """
        for position, piece in _pieces(extents, into):
            rest = piece
            while rest:
                count = os.preadv(self._handle, [rest], position)
                if not count:
                    return False
                position, rest = position + count, rest[count:]
        return True

    def sync(self) -> None:
        """Return when all bytes written so far are on the medium."""
        os.fdatasync(self._handle)

    def close(self) -> None:
        """Close the file."""
        os.close(self._handle)


def _pieces(extents: Sequence[Extent], buffers: Sequence[Buffer]) -> Iterator[tuple[int, memoryview]]:
    """Yield the parts of buffers that are adjacent in the file, each with its position in bytes."""
    runs = iter(extents)
    position, room = 0, 0
    for buffer in buffers:
        rest = memoryview(buffer).cast("B")
        while rest:
            if not room:
                run = next(runs)
                position, room = run.start * PAGE_BYTES, run.pages * PAGE_BYTES
            piece = rest[:room]
            yield position, piece
            position, room, rest = position + len(piece), room - len(piece), rest[len(piece) :]
