"""What has changed in a cache since somebody looked: between the thread that steps and the one that publishes.

Changes that cancel out are forgotten: what waits is never more than what the cache holds and what was told of it,
however long nobody looks. Each side holds the lock for as long as it takes to note one change, or to take them all.
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
    """A cached block: what it continues, its tokens, and, for the first of a sequence only, the salt of its keys."""

    parent: BlockHash | None
    tokens: array[int]
    salt: str | None


@dataclass
class Delta:
    """Changes to be put into effect in the order of the fields.

    Attributes:
        cleared: Everything was forgotten first.
        states_removed: Snapshots that are gone.
        removed: Blocks that are gone, each after those that continue it.
        stored: New blocks, each before those that continue it.
        states_stored: New snapshots.
    """

    cleared: bool = False
    states_removed: dict[BlockHash, None] = field(default_factory=dict)
    removed: dict[BlockHash, None] = field(default_factory=dict)
    stored: dict[BlockHash, Block] = field(default_factory=dict)
    states_stored: dict[BlockHash, None] = field(default_factory=dict)


class Changes:
    """The observer of one cache; see `CacheObserver`.

    Args:
        wake: Called when something has changed and nothing had before; must not wait.
    """

    def __init__(self, wake: Callable[[], None] = lambda: None) -> None:
        self._wake = wake
        self._lock = threading.Lock()
        self._blocks: set[BlockHash] = set()  # that the cache has
        self._states: set[BlockHash] = set()
        self._delta: Delta | None = None  # None: nothing has changed
        self._is_off = False

    def take(self) -> Delta | None:
        """All changes since the last call; None if there are none."""
        with self._lock:
            taken, self._delta = self._delta, None
        return taken

    def stop(self) -> None:
        """Nobody will look any more."""
        with self._lock:
            self._is_off = True
            self._delta = None

    def _open(self) -> Delta:
        """What changes are noted in; the lock is held."""
        if self._delta is None:
            self._delta = Delta()
            self._wake()
        return self._delta

    def on_blocks_stored(self, run: PublishedRun) -> None:
        """They are noted with copies of their tokens, but for those that are known."""
        size, parent = run.block_size, run.parent
        start = run.end - len(run.block_hashes) * size
        with self._lock:
            if self._is_off:
                return
            for block_hash in run.block_hashes:
                if block_hash not in self._blocks:
                    self._blocks.add(block_hash)
                    delta = self._open()
                    if block_hash in delta.removed:  # it was told, and is the same
                        del delta.removed[block_hash]
                    else:
                        salt = run.salt if parent is None else None
                        delta.stored[block_hash] = Block(parent, run.tokens[start : start + size], salt)
                parent, start = block_hash, start + size

    def on_blocks_removed(self, block_hashes: Iterable[BlockHash]) -> None:
        """Those that were never told are forgotten."""
        self._removed(block_hashes, self._blocks, lambda delta: (delta.stored, delta.removed))

    def on_snapshot_stored(self, block_hash: BlockHash) -> None:
        """See `CacheObserver`."""
        with self._lock:
            if block_hash not in self._states and not self._is_off:
                self._states.add(block_hash)
                delta = self._open()
                if block_hash in delta.states_removed:
                    del delta.states_removed[block_hash]
                else:
                    delta.states_stored[block_hash] = None

    def on_snapshot_removed(self, block_hash: BlockHash) -> None:
        """See `CacheObserver`."""
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
        """Whatever was noted before does not matter any more."""
        with self._lock:
            self._blocks.clear()
            self._states.clear()
            if not self._is_off:
                self._open()
                self._delta = Delta(cleared=True)
