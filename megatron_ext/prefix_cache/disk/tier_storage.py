"""Storage of the disk tier as the engine's thread sees it: calls that never block.

Also loads of the tier: how far one is, on this rank and on all, their counts, and estimates of how long one takes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_ext.prefix_cache.disk.entry import Buffer, EntryKey, NewEntry

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
    """End of a load on this rank.

    Attributes:
        contents: Buffers of each entry, in the order of the items, up to the first that could not be read.
        seconds: Time that reading took.
    """

    contents: Sequence[Sequence[Buffer]]
    seconds: float


# Progress of a load, as a number of which the least of all ranks counts. From 0 on: place of the first failed entry.
OFF = -1  # a rank's tier is off
READING = 2**62
READ = READING + 1


@dataclass
class TierLoad:
    """Load that is under way, or complete and not placed yet.

    Attributes:
        number: Number of the load.
        items: Entries to read.
        size: Bytes to read.
        deadline: Time after which it is given up.
        is_given_up: Whether it is not wanted any more; then it ends after the entry that is being read.
        loaded: End of this rank's part, set by the storage; None while it is under way.
        found: Returns what all ranks have reported, once they have; None until this rank has.
        progress: Progress of the whole load, see `READING`.
    """

    number: int
    items: Sequence[LoadItem]
    size: int
    deadline: float
    is_given_up: bool = False
    loaded: Loaded | None = None
    found: Callable[[], list[int] | None] | None = None
    progress: int = READING

    @property
    def own_progress(self) -> int:
        """Progress of this rank's part."""
        if self.loaded is None:
            return READING
        count = len(self.loaded.contents)
        return READ if count == len(self.items) else count


class TierStorage:
    """Entries on disk. Only `remove` and `clear` wait for the disk; `wait` does so for a bounded time.

    This base class serves a rank that plans for a cache with its bytes on other ranks: it takes all entries, and loads
    end at once.
    """

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
        """Set times of last use; return the entries that have gone since the last `gone`, which then omits them."""
        return ()

    def remove(self, keys: Sequence[EntryKey]) -> None:
        """Remove entries; they are gone from the medium when this returns."""

    def drop(self, keys: Sequence[EntryKey]) -> None:
        """Remove entries some time later, before any of these keys is written again."""

    def load(self, load: TierLoad) -> None:
        """Begin to read the entries of a load, whose `loaded` is set in the end."""
        load.loaded = Loaded([()] * len(load.items), 0.0)

    def gone(self) -> Sequence[EntryKey] | None:
        """Return the entries that have gone since the last call; None for all, and no other will be taken."""
        return ()

    def wait(self, loads: Iterable[TierLoad], seconds: float) -> None:
        """Return when one of the loads has ended that have not yet, after `seconds` at the latest."""
        threading.Event().wait(seconds)

    def clear(self) -> None:
        """Forget all entries, writes and loads; they are gone from the medium when this returns."""


@dataclass
class TierCounts:
    """Counts of a disk tier.

    Attributes:
        evicted: Entries given to the disk as they left memory.
        loads: Loads begun.
        loads_placed: Loads that came back to memory.
        loads_failed: Loads that could not be read.
        loads_late: Loads given up at their deadline.
        loads_useless: Loads given up since blocks before them were evicted, or no request waited any more.
        loads_slower: Loads not begun, since computing was estimated to be quicker.
        load_waits: Requests that waited for loads which have ended.
        load_bytes: Bytes of the loads that were read.
        load_seconds: Seconds of reading them.
    """

    evicted: int = 0
    loads: int = 0
    loads_placed: int = 0
    loads_failed: int = 0
    loads_late: int = 0
    loads_useless: int = 0
    loads_slower: int = 0
    load_waits: int = 0
    load_bytes: int = 0
    load_seconds: float = 0.0


DECAY = 0.8  # weight of earlier measurements, multiplied with each new one
FORGIVENESS = 0.98  # of the seconds of a rate, each time that it decides against a load: it is measured again some time


@dataclass
class MeasuredRate:
    """Moving average of a rate: amounts and seconds, each of less weight with every later one."""

    amount: float = 0.0
    seconds: float = 0.0

    def note(self, amount: float, seconds: float) -> None:
        """Note a measurement."""
        if amount > 0 and seconds > 0:
            self.amount = DECAY * self.amount + amount
            self.seconds = DECAY * self.seconds + seconds

    def seconds_for(self, amount: float) -> float | None:
        """Return the seconds that an amount takes; None if nothing was measured."""
        return amount * self.seconds / self.amount if self.amount else None


class LoadEstimates:
    """Decision whether reading entries is quicker than computing their tokens.

    Attributes:
        reading: Bytes a second that loads have read.
        prefill: Prompt tokens a second that steps have computed.
    """

    def __init__(self) -> None:
        self.reading, self.prefill = MeasuredRate(), MeasuredRate()

    def pays(self, size: int, waiting: int, tokens: int) -> bool:
        """Return whether to load; true as long as one of the two rates is unknown, so that it becomes known.

        Args:
            size: Bytes to read.
            waiting: Bytes that are read before.
            tokens: Tokens that would be computed otherwise.
        """
        reading, computing = self.reading.seconds_for(size + waiting), self.prefill.seconds_for(tokens)
        if reading is None or computing is None or reading < computing:
            return True
        self.reading.seconds *= FORGIVENESS
        return False
