"""Listing of a store for tools: the longest prefixes among its entries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ext.prefix_cache.disk.entry import EntryKind, StoredEntry

MAX_LISTED = 1000


@dataclass(frozen=True)
class Prefix:
    """Stored prefix: the last block or snapshot of a sequence, and all blocks before it.

    Attributes:
        identity: Identity of the model and its settings, in hex.
        end: Hash of its last block, in hex.
        tokens: Number of tokens.
        blocks: Number of blocks that are stored of it; fewer than its length has if some were evicted.
        snapshots: Number of snapshots.
        size: Bytes of blocks and snapshots; entries that several prefixes share count for each prefix.
        used: Time of its last use, seconds since the epoch.
    """

    identity: str
    end: str
    tokens: int
    blocks: int
    snapshots: int
    size: int
    used: float


def prefixes_of(entries: Sequence[StoredEntry]) -> list[Prefix]:
    """Return the prefixes that no other entry continues, the most recently used first."""
    by_end: dict[tuple[bytes, bytes], list[StoredEntry]] = {}
    for entry in entries:
        by_end.setdefault((entry.identity, entry.entry.key.block_hash), []).append(entry)
    continued = {(entry.identity, entry.entry.parent) for entry in entries}
    found = []
    for identity, end in by_end.keys() - continued:
        chain: list[StoredEntry] = []
        here = end
        while (identity, here) in by_end:
            chain += by_end[identity, here]
            here = by_end[identity, here][0].entry.parent
        last = by_end[identity, end][0].entry
        blocks = sum(one.entry.key.kind is EntryKind.BLOCK for one in chain)
        found.append(
            Prefix(
                identity.hex(),
                end.hex(),
                last.depth * len(last.tokens),
                blocks,
                len(chain) - blocks,
                sum(one.size for one in chain),
                max(one.entry.used for one in chain),
            )
        )
    return sorted(found, key=lambda prefix: (prefix.used, prefix.end), reverse=True)
