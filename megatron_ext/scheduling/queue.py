"""Who is waiting, running or paused; always in order of arrival."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Protocol

from megatron_ext.scheduling.prefix_wait.waiting_queue import BlockPins, WaitingQueue
from megatron_ext.scheduling.request import Request

_ARRIVAL = attrgetter("arrival")


class RequestQueue:
    """Requests in order of arrival: a preempted request goes back to where it came from."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __iter__(self) -> Iterator[Request]:
        return iter(tuple(self._requests))

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: Request) -> bool:
        return request in self._requests

    def add(self, request: Request) -> None:
        """Put `request` at its place."""
        assert request not in self._requests, f"request {request.request_id} is here already"
        bisect.insort(self._requests, request, key=_ARRIVAL)

    def remove(self, request: Request) -> None:
        """Take `request` out."""
        self._requests.remove(request)


class _Queue(Protocol):
    """What all three queues can do."""

    def add(self, request: Request) -> None: ...

    def remove(self, request: Request) -> None: ...

    def __contains__(self, request: Request) -> bool: ...


class Queues:
    """Every living request is in exactly one of three queues.

    Waiting requests own nothing. Running ones own blocks and a running state slot, and are considered in each step.
    Paused ones keep what they own but cannot grow: no block is free for their next token.

    Args:
        pins: Is told which blocks waiting requests are to find.
    """

    def __init__(self, pins: BlockPins | None = None) -> None:
        self.waiting = WaitingQueue(pins)
        self.running = RequestQueue()
        self.paused = RequestQueue()

    def __iter__(self) -> Iterator[Request]:
        """All living requests."""
        yield from self.running
        yield from self.paused
        yield from self.waiting

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running) + len(self.paused)

    def move(self, request: Request, target: _Queue) -> None:
        """Take `request` from wherever it is and put it into `target`."""
        self.discard(request)
        target.add(request)

    def discard(self, request: Request) -> None:
        """Take `request` out of its queue."""
        queues: Iterable[_Queue] = (self.waiting, self.running, self.paused)
        for queue in queues:
            if request in queue:
                queue.remove(request)
                return
        raise AssertionError(f"request {request.request_id} is in no queue")
