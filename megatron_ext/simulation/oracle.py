"""Oracle of a simulation: it knows which cached entries later requests will use, and when.

A first replay in a memory without limits records the blocks that each request matches. In a second one the entry goes
whose next use is farthest, as in Belady's order: the best if all entries had one size and were used alone. Snapshots
before the newest one of their session go first, as with hints.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from megatron_ext.config.cache_hints import CacheHints
from megatron_ext.prefix_cache.block_index import BlockIndex
from megatron_ext.prefix_cache.block_pool import BlockId
from megatron_ext.prefix_cache.hash_chain import BlockHash
from megatron_ext.prefix_cache.hints import Hints
from megatron_ext.prefix_cache.snapshot_order import SnapshotOrder


class Uses:
    """Requests that use each block, as a replay recorded them.

    Attributes:
        requests: Requests that match a block, in order, by the block's hash.
        times: Times of these requests, in seconds.
    """

    def __init__(self) -> None:
        self.requests: dict[BlockHash, list[int]] = {}
        self.times: dict[int, float] = {}


class Recorder(Hints):
    """Record of the blocks that requests match; evictions are those without hints.

    Args:
        index: Index of the cached blocks.
        uses: The record.
    """

    def __init__(self, index: BlockIndex, uses: Uses) -> None:
        super().__init__(index)
        self._uses = uses

    def admit(
        self, request_id: int, salt: str | None, hints: CacheHints | None, matched: Sequence[BlockId], depth: int
    ) -> None:
        """Record the blocks that a request matches."""
        super().admit(request_id, salt, hints, matched, depth)
        self._uses.times[request_id] = self._now
        for block in matched:
            self._uses.requests.setdefault(self._index.hash_of(block), []).append(request_id)

    def choose_block(self, victim: BlockId) -> BlockId:
        """Return `victim`."""
        return victim

    def choose_snapshot(
        self, victim: BlockHash, order: SnapshotOrder, may_go: Callable[[BlockHash], bool] = bool
    ) -> BlockHash:
        """Return `victim`."""
        return victim

    def spent_snapshot(
        self, victim: BlockId, may_go: Callable[[BlockHash], bool], max_gap: float = math.inf
    ) -> BlockHash | None:
        """Return None."""
        return None


class Oracle(Hints):
    """Choice of the entry whose next use is farthest, among those of all tenants.

    Args:
        index: Index of the cached blocks.
        uses: Record of a replay of the same trace.
    """

    def __init__(self, index: BlockIndex, uses: Uses) -> None:
        super().__init__(index)
        self._times = uses.times
        self._coming = {block_hash: requests[::-1] for block_hash, requests in uses.requests.items()}
        self._admitted: set[int] = set()
        self._evictable: dict[BlockId, None] = {}
        self._last: tuple[BlockId | None, float] = None, math.inf  # parent of the last choice, and its next use

    def admit(
        self, request_id: int, salt: str | None, hints: CacheHints | None, matched: Sequence[BlockId], depth: int
    ) -> None:
        """Take note of an admitted request, whose uses are past."""
        self._admitted.add(request_id)
        super().admit(request_id, salt, hints, matched, depth)

    def hold(self, blocks: Iterable[BlockId]) -> None:
        """Take note of blocks that have become evictable."""
        held = list(blocks)
        super().hold(held)
        self._evictable.update(dict.fromkeys(held))
        self._last = None, math.inf

    def reuse(self, blocks: Iterable[BlockId]) -> None:
        """Take note of evictable blocks that are in use again."""
        used = list(blocks)
        super().reuse(used)
        for block in used:
            del self._evictable[block]
        self._last = None, math.inf

    def forget(self, blocks: Iterable[BlockId]) -> None:
        """Take note of blocks that are no longer cached."""
        gone = list(blocks)
        super().forget(gone)
        for block in gone:
            self._evictable.pop(block, None)

    def move(self, old: BlockId, new: BlockId) -> None:
        """Take note that the contents of the block `old` are in `new` now; among equals it counts as held last."""
        super().move(old, new)
        if old in self._evictable:
            del self._evictable[old]
            self._evictable[new] = None
        self._last = None, math.inf

    def choose_block(self, victim: BlockId) -> BlockId:
        """Return the evictable leaf whose next use is farthest; among equals the one held first.

        No use of a block is later than the next one of its child, so a chain goes on as long as its uses are the same.
        """
        index = self._index
        block, next_use = self._last
        if block is None or block not in self._evictable or index.children(block) or self._next(block) != next_use:
            leaves = (one for one in self._evictable if not index.children(one))
            block = max(leaves, key=self._next)
        self._last = index.parent(block), self._next(block)
        return block

    def choose_snapshot(
        self, victim: BlockHash, order: SnapshotOrder, may_go: Callable[[BlockHash], bool] = bool
    ) -> BlockHash:
        """Return a snapshot that is not used again, else a spent one, else the one whose next use is farthest."""
        farthest = max(filter(may_go, order), key=self._next_use, default=victim)
        if self._next_use(farthest) == math.inf:
            return farthest
        chosen = super().choose_snapshot(victim, order, may_go)
        return farthest if chosen == victim else chosen

    def _next(self, block: BlockId) -> float:
        return self._next_use(self._index.hash_of(block))

    def _next_use(self, block_hash: BlockHash) -> float:
        """Return the time of the next use of a block; infinity without one."""
        coming = self._coming.get(block_hash)
        while coming and coming[-1] in self._admitted:
            coming.pop()
        return self._times[coming[-1]] if coming else math.inf
