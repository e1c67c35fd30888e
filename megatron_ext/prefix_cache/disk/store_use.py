"""Counts of the store of cache entries on disk, for monitoring."""

from __future__ import annotations

from dataclasses import dataclass

# Reasons why entries are dropped, or not taken.
BAD_ROW = "row"  # its row in the index is damaged, or contradicts another one
BAD_INDEX = "index"  # the whole index is damaged
BAD_BYTES = "checksum"
BAD_TOKENS = "tokens"  # they are not those of its block hash, or not those that were asked for
TOO_SHORT = "short"  # the data file lacks some of its bytes, or it has another size than was asked for
EVICTED = "evicted"  # for entries of more worth, or because the budget is smaller now
OTHER_IDENTITY = "other_identity"  # evicted, and of another model or setting
LESS_WORTH = "less_worth"  # not taken: only entries of more worth could make room


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
    drops: dict[str, int]
    is_on: bool
