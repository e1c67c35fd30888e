"""Which snapshot gives up its slot first.

The contract (`SnapshotOrder`), for the index of snapshots that calls it:

- `add(digest, rank)`: the snapshot of `digest` has become visible.
- `use(digest)`: a request resumes from it; from now on it is an ordinary one.
- `remove(digest)`: it is gone.
- `evict(ranks)`: the one that gives up its slot now, gone from here; of the first of `ranks` that has any; or None.

`MAY_TAKE` says who may take whose slot. Opportunistic ones, which go before every other, are `opportunistic.py`'s: an
order of the others never sees them.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Protocol

from megatron_ext.prefix_cache.hash_chain import Digest


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

    def add(self, digest: Digest, rank: Rank) -> None:
        """It is visible."""

    def use(self, digest: Digest) -> None:
        """It was consumed."""

    def remove(self, digest: Digest) -> None:
        """It is gone."""

    def evict(self, ranks: Sequence[Rank]) -> Digest | None:
        """The next to go."""

    def rank(self, digest: Digest) -> Rank | None:
        """Of a snapshot that is there; None of others."""

    def clear(self) -> None:
        """None is there any more."""

    def check(self) -> None:
        """Assert its invariants."""

    def __iter__(self) -> Iterator[Digest]: ...


class LruSnapshots:
    """The one consumed longest ago; one that was never consumed counts from when it became visible (HY-5)."""

    def __init__(self) -> None:
        self._queues: dict[Rank, OrderedDict[Digest, None]] = {rank: OrderedDict() for rank in Rank}

    def add(self, digest: Digest, rank: Rank) -> None:
        """As the youngest of its rank."""
        self._queues[rank][digest] = None

    def use(self, digest: Digest) -> None:
        """As the youngest of the ordinary ones."""
        self.remove(digest)
        self.add(digest, Rank.ORDINARY)

    def remove(self, digest: Digest) -> None:
        """It is gone."""
        for queue in self._queues.values():
            queue.pop(digest, None)

    def evict(self, ranks: Sequence[Rank]) -> Digest | None:
        """The oldest."""
        for rank in ranks:
            if self._queues[rank]:
                return self._queues[rank].popitem(last=False)[0]
        return None

    def rank(self, digest: Digest) -> Rank | None:
        """Of a snapshot that is there; None of others."""
        return next((rank for rank, queue in self._queues.items() if digest in queue), None)

    def clear(self) -> None:
        """Forget all."""
        for queue in self._queues.values():
            queue.clear()

    def check(self) -> None:
        """Assert that each is in one queue."""
        assert len(set(self)) == len(list(self)), "a snapshot has two ranks"

    def __iter__(self) -> Iterator[Digest]:
        return (digest for queue in self._queues.values() for digest in queue)
