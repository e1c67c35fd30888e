"""Storage of the disk tier as the engine's thread sees it: calls that never block, and events with their results."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_ext.prefix_cache.disk.data_file import Buffer
from megatron_ext.prefix_cache.disk.entry import EntryKey, NewEntry

Content = tuple[NewEntry, Sequence[Buffer]]


class LoadItem(NamedTuple):
    """Entry to read.

    Attributes:
        key: Key of the entry.
        sizes: Bytes of each buffer of the entry.
        tokens: Token ids that the entry's block should have; None if the block hash is enough.
    """

    key: EntryKey
    sizes: Sequence[int]
    tokens: Sequence[int] | None = None


@dataclass(frozen=True)
class Loaded:
    """End of a load.

    Attributes:
        number: Number of the load.
        contents: Buffers of each entry, in the order of the items; None if one could not be read.
        seconds: Time that reading took.
        failed: Place of the first item that could not be read, if there is one.
    """

    number: int
    contents: Sequence[Sequence[Buffer]] | None
    seconds: float
    failed: int = 0


@dataclass(frozen=True)
class EvictedEntries:
    """Entries that are not on disk any more, or were not taken; None: all of them, and no other will be taken."""

    keys: Sequence[EntryKey] | None


Event = Loaded | EvictedEntries


class TierStorage:
    """Entries on disk. Only `remove` and `clear` wait for the disk; `wait` does so for a bounded time.

    This base class serves a rank that plans for a cache with its bytes on other ranks: it takes all entries, and loads
    end at once.
    """

    def __init__(self) -> None:
        self._ended: list[Event] = []

    def write(self, key: EntryKey, size: int, content: Callable[[], Content]) -> bool:
        """Write an entry some time later.

        Args:
            key: Key of the entry.
            size: Bytes of the entry.
            content: Returns the entry and a copy of its bytes; called before this returns, or never.

        Returns:
            False if too many bytes wait to be written; then the entry is not taken.
        """
        return True

    def touch(self, used: Mapping[EntryKey, float]) -> Sequence[EntryKey]:
        """Set times of last use; return the entries that have gone since the last `take`, which then omits them."""
        return ()

    def remove(self, keys: Sequence[EntryKey]) -> None:
        """Remove entries; they are gone from the medium when this returns."""

    def drop(self, keys: Sequence[EntryKey]) -> None:
        """Remove entries some time later, before any of these keys is written again."""

    def load(self, number: int, items: Sequence[LoadItem]) -> None:
        """Begin to read entries; `take` returns a `Loaded` with this number, unless it is cancelled before."""
        self._ended.append(Loaded(number, [()] * len(items), 0.0))

    def cancel(self, number: int) -> None:
        """Give up a load, which may have ended."""

    def take(self) -> list[Event]:
        """Return the events since the last call, in order."""
        taken, self._ended = self._ended, []
        return taken

    def wait(self, seconds: float) -> None:
        """Return when a load has ended, after `seconds` at the latest."""
        threading.Event().wait(seconds)

    def clear(self) -> None:
        """Forget all entries, writes and loads; they are gone from the medium when this returns."""
