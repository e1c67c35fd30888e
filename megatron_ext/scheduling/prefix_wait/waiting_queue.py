"""Queue of requests waiting for admission: awake and examined in each step, or asleep until their leader progresses.

A follower sleeps under its leader and under the block hash of the last block that it waits for, so that thousands of
followers cost a step nothing. `published`, `cancelled`, `on_leader_gone` and `forget` wake followers; an early wake-up
costs an examination and changes no plan.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TypeVar

from megatron_ext.prefix_cache.cache import PrefixCache
from megatron_ext.prefix_cache.hash_chain import BlockHash
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.waiting_order import Line, WaitingOrder

_ARRIVAL = attrgetter("arrival")
Key = TypeVar("Key", BlockHash, int)


@dataclass(frozen=True)
class PrefixWait:
    """Prefix wait of a follower: blocks that it waits for or, once they are published, will match when admitted.

    Args:
        leader: Id of the request that computes the blocks.
        block_hash: Hash of the last of the blocks.
        blocks: Number of blocks from the start of the sequence.
        is_published: True once the blocks have been computed and published.
    """

    leader: int
    block_hash: BlockHash
    blocks: int
    is_published: bool = False


class WaitingQueue:
    """Queue of all waiting requests; iterates in order of arrival.

    Args:
        pins: Pins the blocks that followers wait for, from when they fall asleep until they leave or drop the prefix
            wait.
        order: Order of admission, without requests.
    """

    def __init__(self, pins: PrefixCache, order: WaitingOrder) -> None:
        self._pins, self.order = pins, order
        self._members: set[Request] = set()
        self._prefix_waits: dict[Request, PrefixWait] = {}
        self._sleepers: dict[BlockHash, dict[Request, None]] = {}  # by the block hash that they wait for
        self._followers: dict[int, dict[Request, None]] = {}  # the same, by their leaders' ids

    def __iter__(self) -> Iterator[Request]:
        return iter(sorted(self._members, key=_ARRIVAL))

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, request: Request) -> bool:
        return request in self._members

    def add(self, request: Request) -> None:
        """Insert `request`, awake, at its place."""
        assert request not in self._members, f"request {request.request_id} is here already"
        self._members.add(request)
        self.order.add(request)

    def remove(self, request: Request) -> None:
        """Remove `request`."""
        self._members.remove(request)
        is_asleep = self.is_asleep(request)
        if is_asleep:
            self._take_out(request)
        self.order.remove(request, is_awake=not is_asleep)
        self._drop_prefix_wait(request)

    # Queries

    def line(self) -> Line:
        """Return the awake requests, in the order of their turns."""
        return Line(self.order)

    def is_asleep(self, request: Request) -> bool:
        """Return whether `request` sleeps, so that steps need not examine it."""
        prefix_wait = self._prefix_waits.get(request)
        return prefix_wait is not None and not prefix_wait.is_published

    def promised_blocks(self, request: Request) -> int:
        """Return the blocks from its start that were published for `request` while it waited for them; 0 if none."""
        prefix_wait = self._prefix_waits.get(request)
        return prefix_wait.blocks if prefix_wait is not None and prefix_wait.is_published else 0

    def leaders(self) -> Iterable[int]:
        """Return the ids of requests that have sleeping followers."""
        return self._followers.keys()

    def followers_of(self, leader: int) -> Iterable[Request]:
        """Return the requests that sleep under `leader`."""
        return self._followers.get(leader, {}).keys()

    def wakes(self, leader: int, blocks: int) -> bool:
        """Return whether a request sleeps under `leader` that waits for at most this many of its blocks."""
        return any(self._prefix_waits[one].blocks <= blocks for one in self.followers_of(leader))

    def sleepers(self) -> Iterator[tuple[Request, PrefixWait]]:
        """Iterate over sleeping requests with their prefix waits."""
        return (
            (request, prefix_wait)
            for request, prefix_wait in self._prefix_waits.items()
            if not prefix_wait.is_published
        )

    # Sleeping and waking

    def sleep(self, request: Request, leader: int, block_hash: BlockHash, blocks: int) -> None:
        """Let `request` sleep until the leader has published `block_hash`, its block number `blocks`, or has left."""
        assert not self.is_asleep(request), f"request {request.request_id} is asleep already"
        self.order.sleep(request)
        previous = self._prefix_waits.get(request)
        self._prefix_waits[request] = PrefixWait(leader, block_hash, blocks)
        self._pins.want(block_hash)  # before unpinning the other, which may be all that keeps these blocks
        if previous is not None:
            self._pins.unwant(previous.block_hash)
        self._sleepers.setdefault(block_hash, {})[request] = None
        self._followers.setdefault(leader, {})[request] = None

    def published(self, block_hashes: Iterable[BlockHash]) -> None:
        """Wake the requests that wait for one of these newly computed blocks; costs nothing if no request sleeps."""
        for block_hash in block_hashes if self._sleepers else ():
            woken = tuple(self._sleepers.get(block_hash, ()))
            self._wake(woken)
            for request in woken:
                self._prefix_waits[request] = dataclasses.replace(self._prefix_waits[request], is_published=True)

    def cancelled(self, block_hash: BlockHash) -> None:
        """Wake the requests that wait for a cancelled snapshot at the end of this block, to look for another leader."""
        self._requeue(tuple(self._sleepers.get(block_hash, ())))

    def on_leader_gone(self, leader: int) -> None:
        """Wake the followers of a leader that computes nothing any more, to look for another one."""
        self._requeue(tuple(self.followers_of(leader)))

    def forget(self) -> None:
        """Wake all sleepers and drop all prefix waits, since no published block can be found any more."""
        self._requeue(tuple(request for request, _ in self.sleepers()))
        for request in tuple(self._prefix_waits):
            self._drop_prefix_wait(request)
        self.order.forget_ranks()

    def _requeue(self, requests: Sequence[Request]) -> None:
        self._wake(requests)
        for request in requests:
            self._drop_prefix_wait(request)

    def _drop_prefix_wait(self, request: Request) -> None:
        prefix_wait = self._prefix_waits.pop(request, None)
        if prefix_wait is not None:
            self._pins.unwant(prefix_wait.block_hash)

    def _wake(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._take_out(request)
        self.order.wake(requests)

    def _take_out(self, request: Request) -> None:
        prefix_wait = self._prefix_waits[request]
        _take_from(self._sleepers, prefix_wait.block_hash, request)
        _take_from(self._followers, prefix_wait.leader, request)

    def check(self) -> None:
        """Assert that each request is awake or asleep, and that the indexes and the pins agree on the sleepers."""
        asleep = dict(self.sleepers())
        awake = self.order.awake
        assert len(awake) + len(asleep) == len(self._members), "awake and asleep, or neither"
        assert {*awake, *asleep} == self._members, "a request is neither awake nor asleep"
        assert self._prefix_waits.keys() <= self._members, "prefix waits of requests that do not wait"
        self.order.check(self._members)
        for table, name in ((self._sleepers, "block_hash"), (self._followers, "leader")):
            indexed = [(request, key) for key, requests in table.items() for request in requests]
            assert all(table.values()), "an entry without requests"
            assert len(indexed) == len(asleep), "the sleepers and their index disagree"
            assert all(getattr(asleep[request], name) == key for request, key in indexed), f"another {name}"
        pinned = Counter(prefix_wait.block_hash for prefix_wait in self._prefix_waits.values())
        assert pinned == self._pins.wanted(), "blocks kept and blocks wanted disagree"


def _take_from(table: dict[Key, dict[Request, None]], key: Key, request: Request) -> None:
    del table[key][request]
    if not table[key]:
        del table[key]
