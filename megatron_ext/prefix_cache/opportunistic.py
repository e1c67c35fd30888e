"""Snapshots that nobody asked for, in slots that are free anyway (SI-1).

A long prefill leaves states on its way, in case that another request parts from it there. Until somebody resumes from
one it is *opportunistic*: it takes free slots only, and gives its own up to whatever else wants one. So without anybody
who resumes from one, all other snapshots are the same as if there were none: they are kept apart from the order of the
others, which neither weighs them nor weighs by them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_ext.prefix_cache.hash_chain import BlockHash
from megatron_ext.prefix_cache.snapshot_order import Rank, SnapshotOrder


@dataclass
class OpportunisticUse:
    """What became of opportunistic snapshots; counted by `StateIndex`.

    Attributes:
        taken: Written.
        consumed: Somebody resumed from them; since then they are ordinary ones.
        given_up: Gone before that: for want of a slot, with their block, for a snapshot of the same states that was
            asked for, or with everything.
    """

    taken: int = 0
    consumed: int = 0
    given_up: int = 0


class OpportunisticFirst:
    """An order with opportunistic snapshots before all others, the oldest of them first; see `SnapshotOrder`.

    Args:
        order: Of the others; empty.
    """

    def __init__(self, order: SnapshotOrder) -> None:
        self._others = order
        self._queue: OrderedDict[BlockHash, None] = OrderedDict()

    @property
    def opportunistic_count(self) -> int:
        """Those that nobody has consumed."""
        return len(self._queue)

    def add(self, block_hash: BlockHash, rank: Rank) -> None:
        """As the youngest, if it is opportunistic."""
        if rank is Rank.OPPORTUNISTIC:
            self._queue[block_hash] = None
        else:
            self._others.add(block_hash, rank)

    def use(self, block_hash: BlockHash) -> None:
        """Whoever resumes from a opportunistic one makes it one of the others."""
        if block_hash in self._queue:
            del self._queue[block_hash]
            self._others.add(block_hash, Rank.ORDINARY)
        self._others.use(block_hash)

    def remove(self, block_hash: BlockHash) -> None:
        """It is gone."""
        if block_hash in self._queue:
            del self._queue[block_hash]
        else:
            self._others.remove(block_hash)

    def evict(self, ranks: Sequence[Rank]) -> BlockHash | None:
        """A opportunistic one if there is one, and its slot may be taken."""
        if Rank.OPPORTUNISTIC in ranks and self._queue:
            return self._queue.popitem(last=False)[0]
        return self._others.evict([rank for rank in ranks if rank is not Rank.OPPORTUNISTIC])

    def rank(self, block_hash: BlockHash) -> Rank | None:
        """Of a snapshot that is there; None of others."""
        return Rank.OPPORTUNISTIC if block_hash in self._queue else self._others.rank(block_hash)

    def clear(self) -> None:
        """Forget all."""
        self._queue.clear()
        self._others.clear()

    def check(self) -> None:
        """Assert that the others do not know of them."""
        self._others.check()
        assert self._queue.keys().isdisjoint(self._others), "a provisional snapshot is in line with the others"

    def __iter__(self) -> Iterator[BlockHash]:
        yield from self._queue
        yield from self._others
