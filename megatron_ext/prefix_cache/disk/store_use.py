"""Counts of the store of cache entries on disk, for monitoring."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from megatron_ext.prefix_cache.disk.entry import EntryKind, StoredEntry
from megatron_ext.prefix_cache.disk.extents import PAGE_BYTES, pages_of

# Reasons why entries are dropped, or not taken.
BAD_ROW = "row"  # its row in the index is damaged, or contradicts another one
BAD_INDEX = "index"  # the whole index is damaged
BAD_BYTES = "checksum"
BAD_TOKENS = "tokens"  # they are not those of its block hash, or not those that were asked for
TOO_SHORT = "short"  # the data file lacks some of its bytes, or it has another size than was asked for
EVICTED = "evicted"  # for entries used later, or because the budget is smaller now
OTHER_IDENTITY = "other_identity"  # evicted, and of another model or setting
LESS_WORTH = "less_worth"  # not taken: only entries used later could make room
QUEUE_FULL = "queue_full"  # not taken: too many bytes wait for the disk
INCOMPLETE = "incomplete"  # another rank lacks its part, or cannot read it
QUARANTINED = "quarantined"  # an audit found it wrong, or it was computed from such an entry, or may have been
REASONS = (
    BAD_ROW,
    BAD_INDEX,
    BAD_BYTES,
    BAD_TOKENS,
    TOO_SHORT,
    EVICTED,
    OTHER_IDENTITY,
    LESS_WORTH,
    QUEUE_FULL,
    INCOMPLETE,
    QUARANTINED,
)


@dataclass(frozen=True)
class StoreUse:
    """Counts of a store.

    Attributes:
        blocks: Blocks of this identity.
        snapshots: Snapshots of this identity.
        bytes: Bytes of both, in whole pages.
        other_entries: Entries of other identities.
        limit_bytes: Budget of the data file.
        written: Entries written since the start.
        read: Entries read since the start.
        written_bytes: Bytes of the entries written.
        read_bytes: Bytes of the entries read.
        write_seconds: Time that writes and commits took.
        read_seconds: Time that reads took, those included that found damage.
        drops: Entries that were dropped, or not taken, by reason.
        is_on: Whether the store is in use: false after a failure of the directory.
    """

    blocks: int
    snapshots: int
    bytes: int
    other_entries: int
    limit_bytes: int
    written: int
    read: int
    written_bytes: int
    read_bytes: int
    write_seconds: float
    read_seconds: float
    drops: dict[str, int]
    is_on: bool

    @property
    def entries(self) -> int:
        """Entries of this identity."""
        return self.blocks + self.snapshots


@dataclass(frozen=True)
class DiskUse:
    """Counts of the entries on disk of one cache, for results, metrics and the status page.

    Attributes:
        store: Counts of the store.
        loaded: Entries that were put back into memory.
        left_out: Entries that were not written at the end, for want of time or room.
        tier: Counts of what leaves memory and comes back (`TierCounts`); empty if the store is used between processes
            only.
        tier_drops: Entries that the tier did not take, by reason.
    """

    store: StoreUse
    loaded: int
    left_out: int
    tier: Mapping[str, float] = field(default_factory=dict)
    tier_drops: Mapping[str, int] = field(default_factory=dict)

    def shown(self) -> dict[str, object]:
        """Return the counts by name, as in `prefix_cache_disk` of a run's counts."""
        store = self.store
        return {
            "is_on": store.is_on,
            "blocks": store.blocks,
            "snapshots": store.snapshots,
            "bytes": store.bytes,
            "limit_bytes": store.limit_bytes,
            "other_entries": store.other_entries,
            "loaded": self.loaded,
            "read": store.read,
            "written": store.written,
            "left_out": self.left_out,
            "read_bytes": store.read_bytes,
            "written_bytes": store.written_bytes,
            "read_seconds": round(store.read_seconds, 6),
            "write_seconds": round(store.write_seconds, 6),
            **{name: round(value, 6) for name, value in self.tier.items()},
            "drops": dict(sorted((Counter(store.drops) + Counter(self.tier_drops)).items())),
        }


@dataclass
class StoreTally:
    """Running counts of a store, so that reading them costs the same whatever it holds.

    Attributes:
        entries: Entries of the store's identity, by kind.
        pages: Pages of these entries.
        written: Entries written.
        written_bytes: Bytes of entries written.
        write_seconds: Time of writes and commits.
        read: Entries read.
        read_bytes: Bytes of entries read.
        read_seconds: Time of reads.
    """

    entries: dict[EntryKind, int] = field(default_factory=lambda: dict.fromkeys(EntryKind, 0))
    pages: int = 0
    written: int = 0
    written_bytes: int = 0
    write_seconds: float = 0.0
    read: int = 0
    read_bytes: int = 0
    read_seconds: float = 0.0

    def add(self, entry: StoredEntry, sign: int = 1) -> None:
        """Count an entry of the store's identity that is stored now, or with a sign of -1 no longer."""
        self.entries[entry.entry.key.kind] += sign
        self.pages += sign * pages_of(entry.size)

    def forget(self) -> None:
        """Count that nothing is stored."""
        self.entries = dict.fromkeys(EntryKind, 0)
        self.pages = 0

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Count the time of a block of code as that of writes."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.write_seconds += time.perf_counter() - started

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Count the time of a block of code as that of reads."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.read_seconds += time.perf_counter() - started

    def use(self, *, other_entries: int, limit_bytes: int, drops: dict[str, int], is_on: bool) -> StoreUse:
        """Return the present counts; the arguments are fields of `StoreUse`."""
        return StoreUse(
            blocks=self.entries[EntryKind.BLOCK],
            snapshots=self.entries[EntryKind.SNAPSHOT],
            bytes=PAGE_BYTES * self.pages,
            other_entries=other_entries,
            limit_bytes=limit_bytes,
            written=self.written,
            read=self.read,
            written_bytes=self.written_bytes,
            read_bytes=self.read_bytes,
            write_seconds=self.write_seconds,
            read_seconds=self.read_seconds,
            drops=drops,
            is_on=is_on,
        )
