"""Observer of a store."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from megatron_ext.prefix_cache.disk.entry import EntryKey, StoredEntry


class StoreObserver(Protocol):
    """Callbacks on the entries of a store's identity, in the thread that uses the store."""

    def on_stored(self, stored: StoredEntry) -> None:
        """Take note of an entry."""

    def on_removed(self, keys: Iterable[EntryKey]) -> None:
        """Take note that entries are gone: dropped, evicted, or forgotten."""
