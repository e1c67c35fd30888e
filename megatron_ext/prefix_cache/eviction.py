"""Eviction order of cached blocks that no request uses.

Both policies have this order: under `lru` the cache keeps every block until its place is needed, under `ref_zero` only
blocks that a request waits for. Snapshots have an order of their own (`SnapshotOrder`).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence

from megatron_ext.prefix_cache.block_pool import BlockId


class LeafFirstLru:
    """Evictable blocks, the least recently used first, and never a block before its children.

    A plain queue does both: a request that uses a block uses all blocks before it in the sequence too, so a block never
    becomes evictable later than its parent, and within one sequence the end does so first. The oldest block is
    therefore a leaf.

    Args:
        clock: Times of uses; shared with the snapshots if both share one memory.
    """

    def __init__(self, clock: Iterator[int]) -> None:
        self._clock = clock
        self._times: dict[BlockId, int] = {}
        self._queue: OrderedDict[int, BlockId] = OrderedDict()  # by time

    def hold(self, blocks: Sequence[BlockId]) -> None:
        """Make cached blocks of one sequence evictable, from its end to its start, as the most recently used."""
        times, queue = self._times, self._queue
        assert times.keys().isdisjoint(blocks), f"one of {blocks} made evictable twice"
        for block, time in zip(blocks, self._clock):  # noqa: B905  # the clock does not end
            times[block] = time
            queue[time] = block

    def take_out(self, blocks: Sequence[BlockId]) -> None:
        """Take blocks out of the queue: they are in use again, or about to be dropped."""
        times, queue = self._times, self._queue
        for block in blocks:
            del queue[times.pop(block)]

    def evict(
        self, count: int, limit: float = math.inf, spared_run: Callable[[BlockId], Sequence[BlockId]] | None = None
    ) -> list[BlockId]:
        """Remove and return the blocks that became evictable first, at most `count`, up to the time `limit`.

        Args:
            count: Number of blocks, at most as many as there are.
            limit: Last time of a block to evict.
            spared_run: Returns a block that goes after all others, and those before it in its sequence that no request
                uses, from its end; they become the most recently used. Empty for other blocks.
        """
        evicted: list[BlockId] = []
        spared: dict[BlockId, None] = {}  # no block before its children
        while len(evicted) < count:
            if not self._queue:  # only spared blocks are left
                self.hold([*spared])
                spared, spared_run = {}, None
            time, block = self._queue.popitem(last=False)
            if time > limit:
                self._queue[time] = block
                self._queue.move_to_end(time, last=False)
                break
            del self._times[block]
            run = () if spared_run is None else spared_run(block)
            self.take_out(
                [one for one in run[1:] if one in self._times]
            )  # with their child, or they would go before it
            for one in run:  # after it, too, where another child has brought them along
                spared.pop(one, None)
                spared[one] = None
            evicted += () if run else (block,)
        self.hold([*spared])
        return evicted

    def next_priority(self) -> float:
        """Return the time at which the next block became evictable; infinity without one."""
        return next(iter(self._queue), math.inf)

    def follow_moves(self, moves: Mapping[BlockId, BlockId]) -> None:
        """Note that the contents of blocks, evictable or not, are in others now, old to new."""
        for old in moves.keys() & self._times.keys():
            time = self._times.pop(old)
            self._times[moves[old]] = time
            self._queue[time] = moves[old]

    def clear(self) -> None:
        """Empty the queue."""
        self._times.clear()
        self._queue.clear()

    def check(self) -> None:
        """Assert that the queue is in order of time, and agrees with the times."""
        assert list(self._queue) == sorted(self._queue), "the queue is out of order"
        assert {block: time for time, block in self._queue.items()} == self._times, "a block has two times"

    def __len__(self) -> int:
        return len(self._times)

    def __iter__(self) -> Iterator[BlockId]:
        """Iterate over the blocks, the first to evict at the start."""
        return iter(self._queue.values())

    def __contains__(self, block: BlockId) -> bool:
        return block in self._times
