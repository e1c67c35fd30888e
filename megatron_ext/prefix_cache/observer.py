"""Observer interface for changes of a cache's contents. A cache without an observer does no extra work."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron_ext.prefix_cache.hash_chain import BlockHash


@dataclass(frozen=True)
class PublishedRun:
    """A run of blocks of one sequence that has become findable; some of the blocks may have been findable before.

    Attributes:
        block_hashes: Block hashes, in order.
        parent: Block hash of the block before the run; None at the start of a sequence.
        tokens: Token ids of the whole sequence.
        block_size: Tokens of a block.
        end: End of the last block, in tokens from the start of the sequence.
        salt: Salt of the sequence's keys.
    """

    block_hashes: Sequence[BlockHash]
    parent: BlockHash | None
    tokens: array[int]
    block_size: int
    end: int
    salt: str | None = None


class EntryObserver(Protocol):
    """Callbacks on the entries of one medium, memory or disk, in the thread that changes them; they must not block."""

    def on_blocks_stored(self, run: PublishedRun) -> None:
        """Take note that the blocks of `run` can be found."""

    def on_blocks_removed(self, block_hashes: Iterable[BlockHash]) -> None:
        """Take note that blocks are gone, each after its children; the snapshots at their ends went before."""

    def on_snapshot_stored(self, block_hash: BlockHash) -> None:
        """Take note that a request can resume after this block, which can be found."""

    def on_snapshot_removed(self, block_hash: BlockHash) -> None:
        """Take note that a request can no longer resume after this block."""


class CacheObserver(EntryObserver, Protocol):
    """Callbacks on changes of a cache."""

    def on_cleared(self) -> None:
        """Take note that the cache is empty."""
