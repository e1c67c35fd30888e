"""Counts of the store of cache entries on disk, for monitoring."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from megatron_ext.prefix_cache.disk.entry import PAGE_BYTES, EntryKind, StoredEntry

# Reasons why entries are dropped, or not taken.
BAD_BYTES = "checksum"
BAD_TOKENS = "tokens"  # its tokens contradict its block hash, or differ from the requested tokens
TOO_SHORT = "short"  # its file is gone, or has fewer bytes than requested
EVICTED = "evicted"  # for entries used later, or because the budget is smaller now
OTHER_IDENTITY = "other_identity"  # evicted, and of another model or setting
LESS_WORTH = "less_worth"  # not taken: only entries used later could make room
NO_ROOM = "no_room"  # not taken: no room on the device; not taken or read: no memory, or too many open files
QUEUE_FULL = "queue_full"  # not taken: too many bytes wait for the disk
INCOMPLETE = "incomplete"  # another rank lacks its part, or cannot read it
QUARANTINED = "quarantined"  # an audit found it wrong, or it was computed from such an entry, or may have been
REASONS = (
    BAD_BYTES,
    BAD_TOKENS,
    TOO_SHORT,
    EVICTED,
    OTHER_IDENTITY,
    LESS_WORTH,
    NO_ROOM,
    QUEUE_FULL,
    INCOMPLETE,
    QUARANTINED,
)


@dataclass
class StoreUse:
    """Counts of a store.

    Attributes:
        limit_bytes: Budget of the files.
        is_on: Whether the store is in use: false after a failure of the directory.
        blocks: Blocks of this identity.
        snapshots: Snapshots of this identity.
        bytes: Bytes of both, in whole pages.
        other_entries: Entries of other identities.
        read: Entries read since the start.
        written: Entries written since the start.
        read_bytes: Bytes of the entries read.
        written_bytes: Bytes of the entries written.
        read_seconds: Time that reads took, those included that found damage.
        write_seconds: Time that writes and commits took.
        drops: Entries that were dropped, or not taken, by reason.
    """

    limit_bytes: int
    is_on: bool = True
    blocks: int = 0
    snapshots: int = 0
    bytes: int = 0
    other_entries: int = 0
    read: int = 0
    written: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    read_seconds: float = 0.0
    write_seconds: float = 0.0
    drops: Counter[str] = field(default_factory=Counter)

    @property
    def entries(self) -> int:
        """Entries of this identity."""
        return self.blocks + self.snapshots

    def add(self, entry: StoredEntry, sign: int = 1) -> None:
        """Count an entry of this identity that is stored now, or with a sign of -1 no longer."""
        is_block = entry.key.kind is EntryKind.BLOCK
        self.blocks += sign * is_block
        self.snapshots += sign * (not is_block)
        self.bytes += sign * PAGE_BYTES * entry.pages

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the time of a block of code to `read_seconds` or `write_seconds`."""
        started = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, name, getattr(self, name) + time.perf_counter() - started)


@dataclass(frozen=True)
class DiskUse:
    """Counts of the entries on disk of one cache, for results, metrics and the status page.

    Attributes:
        store: Counts of the store.
        loaded: Entries that were put back into memory.
        left_out: Entries that were not written at the end, for want of time or room.
        tier: Counts of what leaves memory and comes back (`TierCounts`); empty before the tier is live.
        tier_drops: Entries that the tier did not take, by reason.
    """

    store: StoreUse
    loaded: int
    left_out: int
    tier: Mapping[str, float] = field(default_factory=dict)
    tier_drops: Mapping[str, int] = field(default_factory=dict)

    def shown(self) -> dict[str, object]:
        """Return the counts by name, as in `prefix_cache_disk` of a run's counts."""
        counts = vars(self.store) | {"loaded": self.loaded, "left_out": self.left_out} | dict(self.tier)
        drops = Counter(self.store.drops) + Counter(self.tier_drops)
        return {name: round(count, 6) for name, count in counts.items() if name != "drops"} | {
            "is_on": self.store.is_on,
            "drops": dict(sorted(drops.items())),
        }
