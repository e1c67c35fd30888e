"""Scan of an index that is opened: which rows can be used, and why the others cannot."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from megatron_ext.prefix_cache.disk.entry import EntryKey, StoredEntry
from megatron_ext.prefix_cache.disk.index import DiskIndex
from megatron_ext.prefix_cache.disk.store_use import BAD_ROW, TOO_SHORT


@dataclass(frozen=True)
class IndexScan:
    """Rows of an index.

    Attributes:
        kept: Entries of the rows that can be used: no two have a page or, within an identity, a key in common.
        dropped: Numbers of the other rows, each with the reason.
    """

    kept: list[StoredEntry]
    dropped: dict[int, str]


def scan_index(index: DiskIndex, file_pages: int) -> IndexScan:
    """Read all rows of an index.

    Args:
        index: The index.
        file_pages: Pages that the data file has.
    """
    sound, unsound = index.load()
    dropped = dict.fromkeys(unsound, BAD_ROW)
    shared = _taken_twice(sound)
    kept: list[StoredEntry] = []
    keys: set[tuple[bytes, EntryKey]] = set()
    for entry in sound:
        key, end = (entry.identity, entry.entry.key), max(extent.end for extent in entry.extents)
        if entry.row_id in shared or key in keys:
            dropped[entry.row_id] = BAD_ROW
        elif end > file_pages:
            dropped[entry.row_id] = TOO_SHORT
        else:
            keys.add(key)
            kept.append(entry)
    return IndexScan(kept, dropped)


def _taken_twice(entries: Iterable[StoredEntry]) -> Collection[int]:
    """Return the numbers of the rows whose pages belong to another row, too."""
    ordered = sorted((extent, entry.row_id) for entry in entries for extent in entry.extents)
    found: set[int] = set()
    end, owner = 0, 0
    for extent, row_id in ordered:
        if extent.start < end:
            found |= {owner, row_id}
        if extent.end > end:
            end, owner = extent.end, row_id
    return found
