"""Changes of a cache since the last read, passed from the engine thread to the publisher thread.

Changes that cancel out are dropped: the pending ones never exceed the cache's contents plus the published contents,
however long the publisher does not read. Each side holds the lock only to record one change, or to take them all.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from megatron_ext.prefix_cache.hash_chain import BlockHash
from megatron_ext.prefix_cache.observer import PublishedRun


@dataclass(frozen=True)
class Block:
    """Cached block: its parent, its tokens, and, for the first block of a sequence only, the salt of its keys."""

    parent: BlockHash | None
    tokens: array[int]
    salt: str | None


@dataclass
class Delta:
    """Changes of a cache, to be applied in the order of the fields.

    Attributes:
        cleared: Whether the cache was cleared first.
        states_removed: Removed snapshots.
        removed: Removed blocks, each after its children.
        stored: New blocks, each before its children.
        states_stored: New snapshots.
    """

    cleared: bool = False
    states_removed: dict[BlockHash, None] = field(default_factory=dict)
    removed: dict[BlockHash, None] = field(default_factory=dict)
    stored: dict[BlockHash, Block] = field(default_factory=dict)
    states_stored: dict[BlockHash, None] = field(default_factory=dict)


class Changes:
    """Observer of one cache that records its changes; see `CacheObserver`.

    Args:
        wake: Called on the first change after a read; must not block.
    """

    def __init__(self, wake: Callable[[], None] = lambda: None) -> None:
        self._wake = wake
        self._lock = threading.Lock()
        self._blocks: set[BlockHash] = set()  # in the cache
        self._states: set[BlockHash] = set()
        self._delta: Delta | None = None  # None: no changes
        self._is_off = False

    def take(self) -> Delta | None:
        """Return all changes since the last call; None without changes."""
        with self._lock:
            taken, self._delta = self._delta, None
        return taken

    def stop(self) -> None:
        """Stop recording: the changes will not be read any more."""
        with self._lock:
            self._is_off = True
            self._delta = None

    def _open(self) -> Delta:
        """Return the pending changes, creating them if needed; the lock must be held."""
        if self._delta is None:
            self._delta = Delta()
            self._wake()
        return self._delta

    def on_blocks_stored(self, run: PublishedRun) -> None:
        """Record the blocks that are not known yet, with copies of their tokens."""
        size, parent = run.block_size, run.parent
        start = run.end - len(run.block_hashes) * size
        with self._lock:
            if self._is_off:
                return
            for block_hash in run.block_hashes:
                if block_hash not in self._blocks:
                    self._blocks.add(block_hash)
                    delta = self._open()
                    if block_hash in delta.removed:  # it was published, and is unchanged
                        del delta.removed[block_hash]
                    else:
                        salt = run.salt if parent is None else None
                        delta.stored[block_hash] = Block(parent, run.tokens[start : start + size], salt)
                parent, start = block_hash, start + size

    def on_blocks_removed(self, block_hashes: Iterable[BlockHash]) -> None:
        """Record removed blocks; a block that was not published yet is dropped from the pending changes."""
        self._removed(block_hashes, self._blocks, lambda delta: (delta.stored, delta.removed))

    def on_snapshot_stored(self, block_hash: BlockHash) -> None:
        """Record a new snapshot."""
        with self._lock:
            if block_hash not in self._states and not self._is_off:
                self._states.add(block_hash)
                delta = self._open()
                if block_hash in delta.states_removed:
                    del delta.states_removed[block_hash]
                else:
                    delta.states_stored[block_hash] = None

    def on_snapshot_removed(self, block_hash: BlockHash) -> None:
        """Record a removed snapshot."""
        self._removed([block_hash], self._states, lambda delta: (delta.states_stored, delta.states_removed))

    def _removed(
        self,
        block_hashes: Iterable[BlockHash],
        there: set[BlockHash],
        tables: Callable[[Delta], tuple[dict[BlockHash, Block] | dict[BlockHash, None], dict[BlockHash, None]]],
    ) -> None:
        with self._lock:
            for block_hash in block_hashes:
                if block_hash in there and not self._is_off:
                    there.discard(block_hash)
                    stored, removed = tables(self._open())
                    if block_hash in stored:
                        del stored[block_hash]
                    else:
                        removed[block_hash] = None

    def on_cleared(self) -> None:
        """Replace all pending changes by a single clear."""
        with self._lock:
            self._blocks.clear()
            self._states.clear()
            if not self._is_off:
                self._open()
                self._delta = Delta(cleared=True)
