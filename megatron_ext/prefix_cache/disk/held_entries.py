"""Entries that are on disk, or on their way there, by their places in their sequences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from megatron_ext.prefix_cache.disk.entry import EntryKey, EntryKind
from megatron_ext.prefix_cache.hash_chain import BlockHash


class HeldEntry(NamedTuple):
    """Place of an entry on disk in its sequence."""

    parent: BlockHash | None
    depth: int


class HeldEntries(Mapping[EntryKey, HeldEntry]):
    """Entries on disk, as far as is known; counts the blocks that continue each block."""

    def __init__(self) -> None:
        self._entries: dict[EntryKey, HeldEntry] = {}
        self._children: Counter[BlockHash] = Counter()

    def __getitem__(self, key: EntryKey) -> HeldEntry:
        return self._entries[key]

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[EntryKey]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def is_continued(self, block_hash: BlockHash) -> bool:
        """Return whether a block on disk continues the one of this hash."""
        return block_hash in self._children

    def add(self, key: EntryKey, entry: HeldEntry) -> None:
        """Add an entry, unless it is there."""
        if key in self._entries:
            return
        self._entries[key] = entry
        if key.kind is EntryKind.BLOCK and entry.parent is not None:
            self._children[entry.parent] += 1

    def drop(self, keys: Iterable[EntryKey]) -> None:
        """Drop entries, as far as they are there."""
        for key in keys:
            entry = self._entries.pop(key, None)
            if entry is None or entry.parent is None or key.kind is not EntryKind.BLOCK:
                continue
            self._children[entry.parent] -= 1
            if not self._children[entry.parent]:
                del self._children[entry.parent]

    def clear(self) -> None:
        """Drop all entries."""
        self._entries.clear()
        self._children.clear()

    def check(self) -> None:
        """Assert that the counts are those of the entries."""
        parents = (one.parent for key, one in self._entries.items() if key.kind is EntryKind.BLOCK)
        assert self._children == Counter(one for one in parents if one is not None), "wrong counts of blocks on disk"
