"""Eviction order of snapshots.

The contract (`SnapshotOrder`), for the index of snapshots that calls it:

- `add(block_hash, rank)`: add the snapshot of `block_hash`, which has become visible.
- `use(block_hash)`: note that a request resumes from the snapshot; from now on it is an ordinary one.
- `remove(block_hash)`: remove the snapshot.
- `evict(ranks)`: remove and return the next snapshot of the first of `ranks` that has any; None without one.
- `first(rank)`: return the next snapshot of one rank to evict, and its priority, the lowest of that rank; priorities of
  blocks are on the same scale if both share one memory. None if the rank has no snapshot.
- `touch(block_hash)`: note that a request that resumed from the snapshot, or took it, has just ended or still runs;
  only ordinary ones, in a memory that is shared.
- `by_priority()`: return all snapshots, those of lower rank first, and within a rank the next one to evict first.

`MAY_TAKE` defines which ranks may take whose slots. `opportunistic.py` handles opportunistic snapshots, which are
evicted before all others: the orders here never see them.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Protocol

from megatron_ext.prefix_cache.hash_chain import BlockHash
from megatron_ext.prefix_cache.reuse import Reuse


class Rank(enum.IntEnum):
    """Rank of a snapshot; those of a lower rank are evicted before those of a higher one."""

    OPPORTUNISTIC = 0  # not requested, and not consumed yet
    OPTIONAL = 1  # taken in decode, and not consumed yet
    ORDINARY = 2


MAY_TAKE: dict[Rank, tuple[Rank, ...]] = {
    Rank.OPPORTUNISTIC: (),
    Rank.OPTIONAL: (Rank.OPPORTUNISTIC, Rank.OPTIONAL),
    Rank.ORDINARY: (Rank.OPPORTUNISTIC, Rank.OPTIONAL, Rank.ORDINARY),
}


class SnapshotOrder(Protocol):
    """Eviction order of snapshots; the module describes the contract."""

    def add(self, block_hash: BlockHash, rank: Rank) -> None:
        """Add a snapshot that has become visible."""

    def use(self, block_hash: BlockHash) -> None:
        """Note that a request resumes from a snapshot."""

    def remove(self, block_hash: BlockHash) -> None:
        """Remove a snapshot."""

    def evict(self, ranks: Sequence[Rank]) -> BlockHash | None:
        """Remove and return the next snapshot to evict; None if `ranks` have no snapshot."""

    def first(self, rank: Rank) -> tuple[float, BlockHash] | None:
        """Return priority and key of the next snapshot of `rank` to evict; None without one."""

    def touch(self, block_hash: BlockHash) -> None:
        """Note that an ordinary snapshot is in use, or was until now."""

    def rank(self, block_hash: BlockHash) -> Rank | None:
        """Return the rank of a snapshot; None if it is not in the order."""

    def by_priority(self) -> list[BlockHash]:
        """Return all snapshots, by rank, then priority."""

    def clear(self) -> None:
        """Remove all snapshots."""

    def check(self) -> None:
        """Assert the invariants of the order."""

    def __iter__(self) -> Iterator[BlockHash]: ...


class LruSnapshots:
    """Snapshot consumed longest ago first; one never consumed counts from when it became visible (HY-5).

    Args:
        clock: Times of uses; that of the blocks if both share one memory.
        reuse: Shares of blocks and snapshots that are used again, in a memory that is shared: a snapshot counts as
            older than a block of the same age if snapshots have the smaller share, and as younger if blocks have it.
    """

    def __init__(self, clock: Iterator[int] | None = None, reuse: Reuse | None = None) -> None:
        self._clock = count() if clock is None else clock
        self._reuse = reuse
        self._queues: dict[Rank, OrderedDict[int, BlockHash]] = {rank: OrderedDict() for rank in Rank}  # by time
        self._places: dict[BlockHash, tuple[Rank, int]] = {}  # rank and time

    def add(self, block_hash: BlockHash, rank: Rank) -> None:
        """Add a snapshot as the youngest of its rank."""
        time = next(self._clock)
        self._places[block_hash] = rank, time
        self._queues[rank][time] = block_hash

    def use(self, block_hash: BlockHash) -> None:
        """Make a snapshot the youngest of the ordinary ones."""
        self.remove(block_hash)
        self.add(block_hash, Rank.ORDINARY)

    def remove(self, block_hash: BlockHash) -> None:
        """Remove a snapshot."""
        rank, time = self._places.pop(block_hash)
        del self._queues[rank][time]

    def evict(self, ranks: Sequence[Rank]) -> BlockHash | None:
        """Remove and return the oldest snapshot of the first of `ranks` that has any."""
        queue = next((self._queues[rank] for rank in ranks if self._queues[rank]), None)
        if queue is None:
            return None
        _, block_hash = queue.popitem(last=False)
        del self._places[block_hash]
        return block_hash

    def first(self, rank: Rank) -> tuple[float, BlockHash] | None:
        """Return the snapshot of `rank` that was used longest ago, and its priority; None without one.

        The priority is the time at which a block was last used that is as likely to be used again.
        """
        queue, reuse = self._queues[rank], self._reuse
        if not queue:
            return None
        time, block_hash = next(iter(queue.items()))
        if reuse is None:
            return time, block_hash
        now = next(self._clock)
        return now - (now - time) * reuse.snapshot_aging, block_hash

    def touch(self, block_hash: BlockHash) -> None:
        """Make an ordinary snapshot the youngest."""
        self.use(block_hash)

    def rank(self, block_hash: BlockHash) -> Rank | None:
        """Return the rank of a snapshot; None if it is not in the order."""
        place = self._places.get(block_hash)
        return None if place is None else place[0]

    def by_priority(self) -> list[BlockHash]:
        """Return all snapshots by rank, in each rank the one used longest ago first."""
        return list(self)

    def clear(self) -> None:
        """Empty all queues."""
        self._places.clear()
        for queue in self._queues.values():
            queue.clear()

    def check(self) -> None:
        """Assert that each snapshot is in one queue, in order of time."""
        queued = {one: (rank, time) for rank, queue in self._queues.items() for time, one in queue.items()}
        assert queued == self._places, "a snapshot is not at its place"
        assert all(list(queue) == sorted(queue) for queue in self._queues.values()), "a queue is out of order"

    def __iter__(self) -> Iterator[BlockHash]:
        return (block_hash for queue in self._queues.values() for block_hash in queue.values())
