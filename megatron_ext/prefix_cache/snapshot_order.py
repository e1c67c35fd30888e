"""Which snapshot gives up its slot first.

The contract (`SnapshotOrder`), for the index of snapshots that calls it:

- `add(block hash, rank)`: the snapshot of `block_hash` has become visible.
- `use(block hash)`: a request resumes from it; from now on it is an ordinary one.
- `remove(block hash)`: it is gone.
- `evict(ranks)`: the one that gives up its slot now, gone from here; of the first of `ranks` that has any; or None.

`MAY_TAKE` says who may take whose slot. Opportunistic ones, which go before every other, are `opportunistic.py`'s: an
order of the others never sees them.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Protocol

from megatron_ext.prefix_cache.hash_chain import BlockHash


class Rank(enum.IntEnum):
    """Lower ones give up their slots before any higher one."""

    OPPORTUNISTIC = 0  # nobody asked for it, and nobody has consumed it yet
    OPTIONAL = 1  # taken in decode, and not consumed yet
    ORDINARY = 2


MAY_TAKE: dict[Rank, tuple[Rank, ...]] = {
    Rank.OPPORTUNISTIC: (),
    Rank.OPTIONAL: (Rank.OPPORTUNISTIC, Rank.OPTIONAL),
    Rank.ORDINARY: (Rank.OPPORTUNISTIC, Rank.OPTIONAL, Rank.ORDINARY),
}


class SnapshotOrder(Protocol):
    """See the module."""

    def add(self, block_hash: BlockHash, rank: Rank) -> None:
        """It is visible."""

    def use(self, block_hash: BlockHash) -> None:
        """It was consumed."""

    def remove(self, block_hash: BlockHash) -> None:
        """It is gone."""

    def evict(self, ranks: Sequence[Rank]) -> BlockHash | None:
        """The next to go."""

    def rank(self, block_hash: BlockHash) -> Rank | None:
        """Of a snapshot that is there; None of others."""

    def clear(self) -> None:
        """None is there any more."""

    def check(self) -> None:
        """Assert its invariants."""

    def __iter__(self) -> Iterator[BlockHash]: ...


class LruSnapshots:
    """The one consumed longest ago; one that was never consumed counts from when it became visible (HY-5)."""

    def __init__(self) -> None:
        self._queues: dict[Rank, OrderedDict[BlockHash, None]] = {rank: OrderedDict() for rank in Rank}

    def add(self, block_hash: BlockHash, rank: Rank) -> None:
        """As the youngest of its rank."""
        self._queues[rank][block_hash] = None

    def use(self, block_hash: BlockHash) -> None:
        """As the youngest of the ordinary ones."""
        self.remove(block_hash)
        self.add(block_hash, Rank.ORDINARY)

    def remove(self, block_hash: BlockHash) -> None:
        """It is gone."""
        for queue in self._queues.values():
            queue.pop(block_hash, None)

    def evict(self, ranks: Sequence[Rank]) -> BlockHash | None:
        """The oldest."""
        for rank in ranks:
            if self._queues[rank]:
                return self._queues[rank].popitem(last=False)[0]
        return None

    def rank(self, block_hash: BlockHash) -> Rank | None:
        """Of a snapshot that is there; None of others."""
        return next((rank for rank, queue in self._queues.items() if block_hash in queue), None)

    def clear(self) -> None:
        """Forget all."""
        for queue in self._queues.values():
            queue.clear()

    def check(self) -> None:
        """Assert that each is in one queue."""
        assert len(set(self)) == len(list(self)), "a snapshot has two ranks"

    def __iter__(self) -> Iterator[BlockHash]:
        return (block_hash for queue in self._queues.values() for block_hash in queue)
