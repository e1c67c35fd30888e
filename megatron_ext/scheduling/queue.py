"""Request queues: waiting, running and paused. Running and paused requests are in order of arrival."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Protocol

from megatron_ext.prefix_cache.block_pool import BlockId
from megatron_ext.scheduling.prefix_wait.waiting_queue import BlockPins, WaitingQueue
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.waiting_order import WaitingOrder

_ARRIVAL = attrgetter("arrival")


class RequestQueue:
    """Requests in order of arrival: a preempted request returns to its former place."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __iter__(self) -> Iterator[Request]:
        return iter(tuple(self._requests))

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: Request) -> bool:
        return request in self._requests

    def add(self, request: Request) -> None:
        """Insert `request` at its place."""
        assert request not in self._requests, f"request {request.request_id} is here already"
        bisect.insort(self._requests, request, key=_ARRIVAL)

    def remove(self, request: Request) -> None:
        """Remove `request`."""
        self._requests.remove(request)


class _Queue(Protocol):
    """Common interface of the queues."""

    def add(self, request: Request) -> None: ...

    def remove(self, request: Request) -> None: ...

    def __contains__(self, request: Request) -> bool: ...


class Queues:
    """Queues of the living requests; each request is in exactly one of them.

    Waiting requests own nothing. Running ones own blocks and a running state slot, and are considered in each step.
    Paused ones keep their blocks and slot but cannot grow: no block is free for their next token.

    Args:
        pins: Receives the blocks that waiting requests are to find cached.
        order: Order in which waiting requests are admitted; by default the order of arrival.
    """

    def __init__(self, pins: BlockPins | None = None, order: WaitingOrder | None = None) -> None:
        self.waiting = WaitingQueue(pins, order)
        self.running = RequestQueue()
        self.paused = RequestQueue()

    def __iter__(self) -> Iterator[Request]:
        """Iterate over all living requests."""
        yield from self.running
        yield from self.paused
        yield from self.waiting

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running) + len(self.paused)

    def holding(self) -> list[Request]:
        """Return the requests that own blocks."""
        return [*self.running, *self.paused]

    def follow_moves(self, moves: Mapping[BlockId, BlockId]) -> None:
        """Replace the blocks in block tables whose contents were moved, old to new."""
        if not moves:
            return
        for request in self.holding():
            table = request.sequence.block_table
            if not moves.keys().isdisjoint(table):
                request.sequence.block_table = tuple([moves.get(block, block) for block in table])

    def move(self, request: Request, target: _Queue) -> None:
        """Move `request` from its queue to `target`."""
        self.discard(request)
        target.add(request)

    def discard(self, request: Request) -> None:
        """Remove `request` from its queue."""
        queues: Iterable[_Queue] = (self.waiting, self.running, self.paused)
        for queue in queues:
            if request in queue:
                queue.remove(request)
                return
        raise AssertionError(f"request {request.request_id} is in no queue")
