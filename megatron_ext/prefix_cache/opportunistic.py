"""Opportunistic checkpoints: snapshots that no request asked for, in slots that are free anyway (SI-1).

A long prefill leaves snapshots on its way, in case another request diverges from it there. Until a request resumes
from such a snapshot it is *opportunistic*: it takes free slots only, and gives its slot up to any other snapshot. As
long as no request resumes from one, all other snapshots are the same as without them: opportunistic snapshots are kept
apart from the eviction order of the others, which neither ranks them nor is influenced by them.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_ext.prefix_cache.hash_chain import BlockHash
from megatron_ext.prefix_cache.snapshot_order import Rank, SnapshotOrder


@dataclass
class OpportunisticUse:
    """Counts of opportunistic snapshots by outcome; kept by `StateIndex`.

    Attributes:
        taken: Snapshots written.
        consumed: Snapshots that a request resumed from, which made them ordinary ones.
        given_up: Snapshots gone before that: for want of a slot, with their block, for a requested snapshot of the
            same states, or by a reset.
    """

    taken: int = 0
    consumed: int = 0
    given_up: int = 0


class OpportunisticFirst:
    """Eviction order with opportunistic snapshots before all others, the oldest first; see `SnapshotOrder`.

    Args:
        order: Empty order for the other snapshots.
    """

    def __init__(self, order: SnapshotOrder) -> None:
        self._others = order
        self._queue: OrderedDict[BlockHash, None] = OrderedDict()

    @property
    def opportunistic_count(self) -> int:
        """Number of opportunistic snapshots that no request has consumed."""
        return len(self._queue)

    def add(self, block_hash: BlockHash, rank: Rank) -> None:
        """Add a snapshot: an opportunistic one as the youngest, any other to the order of the others."""
        if rank is Rank.OPPORTUNISTIC:
            self._queue[block_hash] = None
        else:
            self._others.add(block_hash, rank)

    def use(self, block_hash: BlockHash) -> None:
        """Note that a request resumes from a snapshot; an opportunistic one becomes an ordinary one."""
        if block_hash in self._queue:
            del self._queue[block_hash]
            self._others.add(block_hash, Rank.ORDINARY)
        self._others.use(block_hash)

    def remove(self, block_hash: BlockHash) -> None:
        """Remove a snapshot."""
        if block_hash in self._queue:
            del self._queue[block_hash]
        else:
            self._others.remove(block_hash)

    def evict(self, ranks: Sequence[Rank]) -> BlockHash | None:
        """Evict the oldest opportunistic snapshot if `ranks` allows it and there is one, else one of the others."""
        if Rank.OPPORTUNISTIC in ranks and self._queue:
            return self._queue.popitem(last=False)[0]
        return self._others.evict([rank for rank in ranks if rank is not Rank.OPPORTUNISTIC])

    def first(self, rank: Rank) -> tuple[float, BlockHash] | None:
        """Return priority and key of the next snapshot of `rank`; opportunistic ones have the lowest of all."""
        if rank is Rank.OPPORTUNISTIC:
            return next(((-math.inf, block_hash) for block_hash in self._queue), None)
        return self._others.first(rank)

    def touch(self, block_hash: BlockHash) -> None:
        """Note that an ordinary snapshot is in use, or was until now."""
        self._others.touch(block_hash)

    def rank(self, block_hash: BlockHash) -> Rank | None:
        """Return the rank of a snapshot; None if it is not in the order."""
        return Rank.OPPORTUNISTIC if block_hash in self._queue else self._others.rank(block_hash)

    def by_priority(self) -> list[BlockHash]:
        """Return all snapshots, the oldest opportunistic one first."""
        return [*self._queue, *self._others.by_priority()]

    def clear(self) -> None:
        """Remove all snapshots."""
        self._queue.clear()
        self._others.clear()

    def check(self) -> None:
        """Assert that no opportunistic snapshot is in the order of the others."""
        self._others.check()
        assert self._queue.keys().isdisjoint(self._others), "a provisional snapshot is in line with the others"

    def __iter__(self) -> Iterator[BlockHash]:
        yield from self._queue
        yield from self._others
