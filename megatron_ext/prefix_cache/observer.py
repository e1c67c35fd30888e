"""Who is told what can be found in a cache and what cannot any more. Without one a cache does nothing more."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron_ext.prefix_cache.hash_chain import BlockHash


@dataclass(frozen=True)
class PublishedRun:
    """Blocks of one sequence that can be found; some of them may have been known.

    Attributes:
        block hashes: Of the blocks, in order.
        parent: What they continue; None at the start of a sequence.
        tokens: Of the sequence.
        block_size: Tokens.
        end: Where the last of them ends, in tokens.
        salt: Of the sequence's keys.
    """

    block_hashes: Sequence[BlockHash]
    parent: BlockHash | None
    tokens: array[int]
    block_size: int
    end: int
    salt: str | None = None


class CacheObserver(Protocol):
    """Told in the thread that changes the cache, so it must not wait for anything."""

    def on_blocks_stored(self, run: PublishedRun) -> None:
        """These can be found."""

    def on_blocks_removed(self, block_hashes: Iterable[BlockHash]) -> None:
        """These cannot any more, each after those that continue it; snapshots at their ends went before."""

    def on_snapshot_stored(self, block_hash: BlockHash) -> None:
        """A request can resume behind this block, which can be found."""

    def on_snapshot_removed(self, block_hash: BlockHash) -> None:
        """It cannot any more."""

    def on_cleared(self) -> None:
        """Nothing can be found."""
