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
        removed: Removed blocks, in memory each after its children.
        stored: New blocks, each before its children.
        states_stored: New snapshots.
        disk: Changes of the entries on disk; None without any.
    """

    cleared: bool = False
    states_removed: dict[BlockHash, None] = field(default_factory=dict)
    removed: dict[BlockHash, None] = field(default_factory=dict)
    stored: dict[BlockHash, Block] = field(default_factory=dict)
    states_stored: dict[BlockHash, None] = field(default_factory=dict)
    disk: Delta | None = None


class TierChanges:
    """Observer of the entries in memory, or of those on disk, that records changes; see `CacheObserver`.

    Args:
        lock: Lock of the pending changes.
        pending: Returns the pending changes, creating them if needed, with the lock held; None when off.
    """

    def __init__(self, lock: threading.Lock, pending: Callable[[], Delta | None]) -> None:
        self._lock, self._pending = lock, pending
        self._blocks: set[BlockHash] = set()  # that are there
        self._states: set[BlockHash] = set()

    def on_blocks_stored(self, run: PublishedRun) -> None:
        """Record the blocks that are not known yet, with copies of their tokens."""
        size, parent = run.block_size, run.parent
        start = run.end - len(run.block_hashes) * size
        with self._lock:
            for block_hash in run.block_hashes:
                if block_hash not in self._blocks:
                    delta = self._pending()
                    if delta is None:
                        return
                    self._blocks.add(block_hash)
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
            delta = None if block_hash in self._states else self._pending()
            if delta is not None:
                self._states.add(block_hash)
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
                delta = self._pending() if block_hash in there else None
                if delta is not None:
                    there.discard(block_hash)
                    stored, removed = tables(delta)
                    if block_hash in stored:
                        del stored[block_hash]
                    else:
                        removed[block_hash] = None

    def _forget(self) -> None:
        self._blocks.clear()
        self._states.clear()


class Changes(TierChanges):
    """Observer of one cache that records its changes; see `CacheObserver`.

    Args:
        wake: Called on the first change after a read; must not block.

    Attributes:
        disk: Observer of the cache's entries on disk, whose changes are read with those in memory.
    """

    def __init__(self, wake: Callable[[], None] = lambda: None) -> None:
        self._wake = wake
        self._delta: Delta | None = None  # None: no changes
        self._is_off = False
        super().__init__(threading.Lock(), self._open)
        self.disk = TierChanges(self._lock, self._open_disk)

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

    def _open(self) -> Delta | None:
        """Return the pending changes, creating them if needed; None when off. The lock must be held."""
        if self._is_off:
            return None
        if self._delta is None:
            self._delta = Delta()
            self._wake()
        return self._delta

    def _open_disk(self) -> Delta | None:
        delta = self._open()
        if delta is None:
            return None
        delta.disk = delta.disk or Delta()
        return delta.disk

    def on_cleared(self) -> None:
        """Replace all pending changes in memory by a single clear; entries on disk are removed one by one."""
        with self._lock:
            self._forget()
            delta = self._open()
            if delta is not None:
                self._delta = Delta(cleared=True, disk=delta.disk)
