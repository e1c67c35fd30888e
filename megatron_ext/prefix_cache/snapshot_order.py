"""Eviction order of snapshots: by rank, and in each rank the one used longest ago first.

`MAY_TAKE` defines which ranks may take whose slots.
"""

from __future__ import annotations

import enum
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from megatron_ext.prefix_cache.hash_chain import BlockHash
from megatron_ext.prefix_cache.reuse import Reuse

MAX_SPARED = 32  # snapshots that one search passes over


class Rank(enum.IntEnum):
    """Rank of a snapshot; snapshots of a lower rank are evicted first."""

    OPPORTUNISTIC = 0  # not requested, and not consumed yet
    OPTIONAL = 1  # taken in decode, and not consumed yet
    ORDINARY = 2


MAY_TAKE: dict[Rank, tuple[Rank, ...]] = {
    Rank.OPPORTUNISTIC: (),
    Rank.OPTIONAL: (Rank.OPPORTUNISTIC, Rank.OPTIONAL),
    Rank.ORDINARY: (Rank.OPPORTUNISTIC, Rank.OPTIONAL, Rank.ORDINARY),
}


class SnapshotOrder:
    """Snapshot consumed longest ago first; one never consumed counts from when it became visible (HY-5).

    As long as no request resumes from an opportunistic snapshot, the others go as they would without it: it takes no
    time of the clock (SI-1).

    Args:
        clock: Times of uses; shared with the blocks if both share one memory.
        reuse: Shares of blocks and snapshots that are used again, in a memory that is shared: a snapshot counts as
            older than a block of the same age if snapshots have the smaller share, and as younger if blocks have it.
    """

    def __init__(self, clock: Iterator[int], reuse: Reuse | None = None) -> None:
        self._clock, self._reuse = clock, reuse
        self._queues: dict[Rank, OrderedDict[BlockHash, int]] = {rank: OrderedDict() for rank in Rank}  # with times

    def add(self, block_hash: BlockHash, rank: Rank) -> None:
        """Add a snapshot that has become visible, as the youngest of its rank."""
        self._queues[rank][block_hash] = 0 if rank is Rank.OPPORTUNISTIC else next(self._clock)

    def use(self, block_hash: BlockHash) -> None:
        """Make a snapshot, which is or was in use, the youngest of the ordinary ones."""
        self.remove(block_hash)
        self.add(block_hash, Rank.ORDINARY)

    def remove(self, block_hash: BlockHash) -> None:
        """Remove a snapshot."""
        rank = self.rank(block_hash)
        assert rank is not None, "it is in the order"
        del self._queues[rank][block_hash]

    def rank(self, block_hash: BlockHash) -> Rank | None:
        """Return the rank of a snapshot; None if it is not in the order."""
        return next((rank for rank, queue in self._queues.items() if block_hash in queue), None)

    def count(self, rank: Rank) -> int:
        """Return the number of snapshots of a rank."""
        return len(self._queues[rank])

    def oldest(self, ranks: Sequence[Rank], is_spared: Callable[[BlockHash], bool]) -> BlockHash | None:
        """Return the oldest snapshot of the first of `ranks` that has any, or a later one if it is spared.

        Returns:
            A snapshot that is not spared, if there is one among the next; None without any snapshot.
        """
        victims = (block_hash for rank in ranks for block_hash in self._queues[rank])
        first = next(victims, None)
        if first is None or not is_spared(first):
            return first
        return next((block_hash for block_hash in islice(victims, MAX_SPARED) if not is_spared(block_hash)), first)

    def priority(self, block_hash: BlockHash) -> float:
        """Return the time at which a block was last used that is as likely to be used again as a snapshot.

        Snapshots that are not ordinary have the lowest priority of all.
        """
        time = self._queues[Rank.ORDINARY].get(block_hash, -math.inf)
        if self._reuse is None or time == -math.inf:
            return time
        now = next(self._clock)
        return now - (now - time) * self._reuse.snapshot_aging

    def clear(self) -> None:
        """Empty all queues."""
        for queue in self._queues.values():
            queue.clear()

    def check(self) -> None:
        """Assert that each snapshot is in one queue, and that queues are in order of time."""
        assert len(set(self)) == len(list(self)), "a snapshot is in two queues"
        for queue in self._queues.values():
            times = list(queue.values())
            assert times == sorted(times), "a queue is out of order"

    def __iter__(self) -> Iterator[BlockHash]:
        """Iterate over all snapshots, the first to evict at the start."""
        return (block_hash for queue in self._queues.values() for block_hash in queue)
