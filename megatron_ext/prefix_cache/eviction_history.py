"""Eviction history: blocks and snapshots lost for want of memory, and the tokens that they would have saved (SI-6).

A bounded number of hashes of blocks and snapshots that were evicted, or never taken, is kept; only the hashes. A
request that could have skipped more tokens with them shows the worth of more memory.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron_ext.prefix_cache.hash_chain import BlockHash
from megatron_ext.prefix_cache.matching import last_boundary, resume_position
from megatron_ext.prefix_cache.state_index import StateIndex

MAX_HASHES = 2**16  # hashes of blocks, and as many of snapshots: about 10 MB


@dataclass(frozen=True)
class LostTokens:
    """Tokens of one prompt that are computed because blocks or snapshots were evicted.

    Attributes:
        for_slots: Tokens that more snapshot slots would have saved.
        for_blocks: Tokens that more blocks, with the snapshots at their ends, would have saved in addition.
        ago: Requests admitted since the entry that would have saved most was evicted.
    """

    for_slots: int = 0
    for_blocks: int = 0
    ago: int = 0


NOTHING_LOST = LostTokens()


class EvictionHistory:
    """Hashes of evicted blocks and snapshots, for reports only: no decision depends on them.

    Args:
        max_hashes: Hashes to keep of blocks, and as many of snapshots.
    """

    def __init__(self, max_hashes: int = MAX_HASHES) -> None:
        self._max_hashes = max_hashes
        # Times of eviction, in admissions, by hash; the oldest is forgotten first.
        self._blocks: OrderedDict[BlockHash, int] = OrderedDict()
        self._snapshots: OrderedDict[BlockHash, int] = OrderedDict()
        self._now = 0  # admissions so far

    def __len__(self) -> int:
        return len(self._blocks) + len(self._snapshots)

    def _note(self, evicted: OrderedDict[BlockHash, int], block_hashes: Iterable[BlockHash]) -> None:
        for block_hash in block_hashes:
            evicted[block_hash] = self._now
            evicted.move_to_end(block_hash)
            if len(evicted) > self._max_hashes:
                evicted.popitem(last=False)

    def on_blocks_evicted(self, block_hashes: Sequence[BlockHash], states: StateIndex | None) -> None:
        """Record the blocks of an eviction, and the snapshots that go with them."""
        self._note(self._blocks, block_hashes)
        if states is not None:
            for block_hash in states.among(block_hashes):
                if not states.is_provisional(block_hash):
                    self.on_snapshot_removed(block_hash)

    def on_snapshot_removed(self, block_hash: BlockHash) -> None:
        """Record a snapshot that was evicted, or found no slot."""
        self._note(self._snapshots, (block_hash,))

    def on_blocks_stored(self, block_hashes: Iterable[BlockHash]) -> None:
        """Forget the hashes of blocks that are cached now."""
        if self._blocks:
            for block_hash in block_hashes:
                self._blocks.pop(block_hash, None)

    def on_snapshot_stored(self, block_hash: BlockHash) -> None:
        """Forget the hash of a snapshot that is stored now."""
        self._snapshots.pop(block_hash, None)

    def clear(self) -> None:
        """Forget all hashes; after a reset, misses are not due to a lack of memory."""
        self._blocks.clear()
        self._snapshots.clear()

    def lost(
        self,
        length: int,
        block_hashes: Sequence[BlockHash],
        matched: int,
        start: int,
        block_size: int,
        states: StateIndex | None,
    ) -> LostTokens:
        """Return the tokens that a request admitted now computes for want of memory; O(1) without evictions.

        Args:
            length: Tokens of the request.
            block_hashes: Hashes of the request's complete blocks.
            matched: Number of them that are cached.
            start: Position where the request resumes.
            block_size: Tokens of a block.
            states: Index of the snapshots; None without recurrent layers.
        """
        self._now += 1
        if not len(self):
            return NOTHING_LOST
        run = matched
        while run < len(block_hashes) and block_hashes[run] in self._blocks:
            run += 1
        if states is None:
            return self._lost(start, start, resume_position(length, run * block_size), block_hashes, block_size)
        with_slots = self._resume(length, block_hashes, matched, start, block_size, states)
        with_blocks = self._resume(length, block_hashes, run, with_slots, block_size, states)
        return self._lost(start, with_slots, with_blocks, block_hashes, block_size)

    def block_ago(self, block_hash: BlockHash) -> int | None:
        """Return the number of requests admitted since the block of `block_hash` was evicted; None if it was not."""
        evicted_at = self._blocks.get(block_hash)
        return None if evicted_at is None else self._now - evicted_at

    def snapshot_ago(self, block_hashes: Sequence[BlockHash]) -> int | None:
        """Return the number of requests admitted since the last of these snapshots was evicted; None if none was."""
        evicted = self._snapshots
        return next((self._now - evicted[one] for one in reversed(block_hashes) if one in evicted), None)

    def _resume(
        self, length: int, block_hashes: Sequence[BlockHash], run: int, start: int, block_size: int, states: StateIndex
    ) -> int:
        """Return the last boundary in a run of blocks that has a snapshot or had one; at least `start`."""
        for blocks in range(min(run, last_boundary(length, block_size) // block_size), start // block_size, -1):
            if block_hashes[blocks - 1] in self._snapshots or states.find(block_hashes[blocks - 1]) is not None:
                return blocks * block_size
        return start

    def _lost(
        self, start: int, with_slots: int, with_blocks: int, block_hashes: Sequence[BlockHash], block_size: int
    ) -> LostTokens:
        end = max(with_slots, with_blocks)
        if end == start:
            return NOTHING_LOST
        block_hash = block_hashes[-(-end // block_size) - 1]
        known = [evicted[block_hash] for evicted in (self._snapshots, self._blocks) if block_hash in evicted]
        return LostTokens(with_slots - start, end - with_slots, self._now - 1 - max(known, default=self._now - 1))

    def check(self, cached: set[BlockHash], snapshots: set[BlockHash]) -> None:
        """Assert that no present entry is recorded as evicted, and that the records are within their bounds."""
        for evicted, remaining in ((self._blocks, cached), (self._snapshots, snapshots)):
            assert not evicted.keys() & remaining, "something is there and gone"
            assert len(evicted) <= self._max_hashes, "too much is remembered"
