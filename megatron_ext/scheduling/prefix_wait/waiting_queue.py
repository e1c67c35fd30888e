"""Who waits for admission: awake, to be looked at in each step, or asleep until what it waits for has changed.

A request that follows another one sleeps under that leader and the block hash of the last block that it waits for, so
that thousands of followers cost a step nothing. `published`, `cancelled`, `on_leader_gone` and `forget` wake them;
waking somebody too early costs a look and changes no plan.
"""

from __future__ import annotations

import bisect
import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol, TypeVar

from megatron_ext.prefix_cache.hash_chain import BlockHash
from megatron_ext.scheduling.request import Request

_ARRIVAL = attrgetter("arrival")
Key = TypeVar("Key", BlockHash, int)


class BlockPins(Protocol):
    """Whoever keeps blocks for waiting requests: the cache."""

    def want(self, block_hash: BlockHash) -> None:
        """A waiting request is to find this block, and all before it."""

    def unwant(self, block_hash: BlockHash) -> None:
        """It is not waiting for that any more."""

    def wanted(self) -> dict[BlockHash, int]:
        """What is wanted, and by how many."""


@dataclass(frozen=True)
class PrefixWait:
    """What a follower waits for, or, once it is published, is to find when it is admitted.

    Args:
        leader: Id of the request that computes it.
        block hash: Of the last block of it.
        blocks: From the start of the sequence.
        is_published: Somebody has computed it since.
    """

    leader: int
    block_hash: BlockHash
    blocks: int
    is_published: bool = False


class WaitingQueue:
    """All waiting requests, in order of arrival.

    Args:
        pins: Is told what followers wait for, from when they fall asleep until they leave or drop their prefix wait.
    """

    def __init__(self, pins: BlockPins | None = None) -> None:
        self._pins = pins
        self._members: set[Request] = set()
        self._awake: list[Request] = []  # in order of arrival
        self._prefix_waits: dict[Request, PrefixWait] = {}
        self._sleepers: dict[BlockHash, dict[Request, None]] = {}  # by what they wait for
        self._followers: dict[int, dict[Request, None]] = {}  # the same, by their leaders' ids

    def __iter__(self) -> Iterator[Request]:
        return iter(sorted(self._members, key=_ARRIVAL))

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, request: Request) -> bool:
        return request in self._members

    def add(self, request: Request) -> None:
        """Let `request` wait, awake, at its place."""
        assert request not in self._members, f"request {request.request_id} is here already"
        self._members.add(request)
        bisect.insort(self._awake, request, key=_ARRIVAL)

    def remove(self, request: Request) -> None:
        """Take `request` out."""
        self._members.remove(request)
        if self.is_asleep(request):
            self._take_out(request)
        else:
            del self._awake[self._place(request)]
        self._drop_prefix_wait(request)

    def _place(self, request: Request) -> int:
        """Where in the line of those awake it stands."""
        return self._awake.index(request, bisect.bisect_left(self._awake, request.arrival, key=_ARRIVAL))

    # Questions

    def line(self) -> Line:
        """Those awake, in order of arrival."""
        return Line(self._awake)

    @property
    def first_awake(self) -> Request | None:
        """Who is looked at first; None if nobody is."""
        return self._awake[0] if self._awake else None

    def is_asleep(self, request: Request) -> bool:
        """Whether it need not be looked at."""
        prefix_wait = self._prefix_waits.get(request)
        return prefix_wait is not None and not prefix_wait.is_published

    def promised_blocks(self, request: Request) -> int:
        """Blocks from its start that have been published for `request` while it waited for them; 0 if none."""
        prefix_wait = self._prefix_waits.get(request)
        return prefix_wait.blocks if prefix_wait is not None and prefix_wait.is_published else 0

    def leaders(self) -> Iterable[int]:
        """Ids of the requests that somebody sleeps under."""
        return self._followers.keys()

    def followers_of(self, leader: int) -> Iterable[Request]:
        """Those that sleep under it."""
        return self._followers.get(leader, {}).keys()

    def sleepers(self) -> Iterator[tuple[Request, PrefixWait]]:
        """All that sleep, and what they wait for."""
        return (
            (request, prefix_wait)
            for request, prefix_wait in self._prefix_waits.items()
            if not prefix_wait.is_published
        )

    # To sleep and to wake

    def sleep(self, request: Request, leader: int, block_hash: BlockHash, blocks: int) -> None:
        """Do not look at `request` before the leader has published `block_hash`, its block number `blocks`, or left."""
        assert not self.is_asleep(request), f"request {request.request_id} is asleep already"
        del self._awake[self._place(request)]
        previous = self._prefix_waits.get(request)
        self._prefix_waits[request] = PrefixWait(leader, block_hash, blocks)
        if self._pins is not None:
            self._pins.want(block_hash)  # before the other is let go, which may be all that keeps blocks of this one
            if previous is not None:
                self._pins.unwant(previous.block_hash)
        self._sleepers.setdefault(block_hash, {})[request] = None
        self._followers.setdefault(leader, {})[request] = None

    def published(self, block_hashes: Iterable[BlockHash]) -> None:
        """Somebody has computed these blocks: whoever waits for one is to find it. Costs nothing where nobody waits."""
        for block_hash in block_hashes if self._sleepers else ():
            self._published(block_hash)

    def _published(self, block_hash: BlockHash) -> None:
        sleepers = self._sleepers.get(block_hash)
        if not sleepers:
            return
        woken = tuple(sleepers)
        self._wake(woken)
        for request in woken:
            prefix_wait = self._prefix_waits[request]
            self._prefix_waits[request] = PrefixWait(
                prefix_wait.leader, prefix_wait.block_hash, prefix_wait.blocks, is_published=True
            )

    def cancelled(self, block_hash: BlockHash) -> None:
        """Nobody takes the states at the end of this block any more: whoever waits for them must look for others."""
        self._requeue(tuple(self._sleepers.get(block_hash, ())))

    def on_leader_gone(self, leader: int) -> None:
        """`leader` computes nothing any more: its followers must look for another one."""
        self._requeue(tuple(self.followers_of(leader)))

    def forget(self) -> None:
        """Nothing that was published can be found any more, and nobody computes anything for others."""
        self._requeue(tuple(request for request, _ in self.sleepers()))
        for request in tuple(self._prefix_waits):
            self._drop_prefix_wait(request)

    def _requeue(self, requests: Sequence[Request]) -> None:
        self._wake(requests)
        for request in requests:
            self._drop_prefix_wait(request)

    def _drop_prefix_wait(self, request: Request) -> None:
        prefix_wait = self._prefix_waits.pop(request, None)
        if prefix_wait is not None and self._pins is not None:
            self._pins.unwant(prefix_wait.block_hash)

    def _wake(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._take_out(request)
        if len(requests) == 1:
            bisect.insort(self._awake, requests[0], key=_ARRIVAL)
        elif requests:
            self._awake += requests
            self._awake.sort(key=_ARRIVAL)  # runs in order already are merged

    def _take_out(self, request: Request) -> None:
        prefix_wait = self._prefix_waits[request]
        _take_from(self._sleepers, prefix_wait.block_hash, request)
        _take_from(self._followers, prefix_wait.leader, request)

    def check(self) -> None:
        """Assert that everybody is awake or asleep, and that the indexes and the pins know the same sleepers."""
        asleep = dict(self.sleepers())
        assert len(self._awake) + len(asleep) == len(self._members), "awake and asleep, or neither"
        assert {*self._awake, *asleep} == self._members, "somebody is neither awake nor asleep"
        assert self._prefix_waits.keys() <= self._members, "prefix waits of requests that do not wait"
        arrivals = [request.arrival for request in self._awake]
        assert arrivals == sorted(arrivals), f"out of order: {arrivals}"
        for table, name in ((self._sleepers, "block_hash"), (self._followers, "leader")):
            indexed = [(request, key) for key, requests in table.items() for request in requests]
            assert all(table.values()), "an entry of nobody"
            assert len(indexed) == len(asleep), "somebody sleeps unknown, or is known to sleep and does not"
            assert all(getattr(asleep[request], name) == key for request, key in indexed), f"another {name}"
        if self._pins is not None:
            pinned = Counter(prefix_wait.block_hash for prefix_wait in self._prefix_waits.values())
            assert pinned == self._pins.wanted(), "kept for nobody, or not kept"


def _take_from(table: dict[Key, dict[Request, None]], key: Key, request: Request) -> None:
    del table[key][request]
    if not table[key]:
        del table[key]


class Line:
    """Those awake, and sleepers that a plan turns out to concern, in order of arrival."""

    def __init__(self, awake: Sequence[Request]) -> None:
        self._awake, self._next = awake, 0
        self._joined: list[tuple[int, int, Request]] = []  # a heap
        self._known: set[Request] = set()

    def __iter__(self) -> Iterator[Request]:
        return self

    def __next__(self) -> Request:
        first = self._awake[self._next] if self._next < len(self._awake) else None
        if self._joined and (first is None or self._joined[0][0] < first.arrival):
            return heapq.heappop(self._joined)[2]
        if first is None:
            raise StopIteration
        self._next += 1
        return first

    def join(self, requests: Iterable[Request], behind: Request) -> None:
        """Look at these, too, in their places; those before `behind` have had their turn."""
        for request in requests:
            if request.arrival > behind.arrival and request not in self._known:
                self._known.add(request)
                heapq.heappush(self._joined, (request.arrival, request.request_id, request))
