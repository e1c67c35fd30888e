"""Request queues: waiting, running and paused, and invariants of the blocks and slots that their requests own.

Running and paused requests are in order of arrival.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterator, Mapping
from operator import attrgetter

from megatron_ext.prefix_cache.block_pool import BlockId
from megatron_ext.prefix_cache.cache import PrefixCache
from megatron_ext.scheduling.plan import SchedulerLimits
from megatron_ext.scheduling.prefix_wait.waiting_queue import WaitingQueue
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.running_slots import RunningSlots
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


class Queues:
    """Queues of the living requests; each request is in exactly one of them.

    Waiting requests own nothing. Running ones own blocks and a running state slot, and are considered in each step.
    Paused ones keep their blocks and slot but cannot grow: no block is free for their next token.

    Args:
        pins: Receives the blocks that waiting requests are to find cached.
        order: Order in which waiting requests are admitted.
    """

    def __init__(self, pins: PrefixCache, order: WaitingOrder) -> None:
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
            table = request.block_table
            if not moves.keys().isdisjoint(table):
                request.block_table = tuple([moves.get(block, block) for block in table])

    def move(self, request: Request, target: RequestQueue | WaitingQueue) -> None:
        """Move `request` from its queue to `target`."""
        self.discard(request)
        target.add(request)

    def discard(self, request: Request) -> None:
        """Remove `request` from its queue."""
        for queue in (self.waiting, self.running, self.paused):
            if request in queue:
                queue.remove(request)
                return
        raise AssertionError(f"request {request.request_id} is in no queue")


def check_ownership(queues: Queues, limits: SchedulerLimits, cache: PrefixCache, running_slots: RunningSlots) -> None:
    """Assert that blocks, slots and reservations are owned as the requests say, and that the queues are sound."""
    held = Counter(block for request in queues for block in request.block_table)
    for block in map(BlockId, range(cache.pool.total)):
        assert cache.pool.references(block) == held[block], f"block {block}: references and tables disagree"
    _check_reservations(queues, cache)
    slots = [request.running_slot for request in queues]
    running_slots.check([slot for slot in slots if slot is not None])
    for queue in (queues.waiting, queues.running, queues.paused):
        arrivals = [request.arrival for request in queue]
        assert arrivals == sorted(arrivals), f"out of order: {arrivals}"
    for request in queues:
        assert not request.is_ended, f"request {request.request_id} has ended and is still queued"
    for request in queues.waiting:
        assert not request.block_table, f"waiting {request.request_id} owns blocks"
        assert request.running_slot is None, f"waiting {request.request_id} owns a running state slot"
        assert request.computed_end == 0, f"waiting {request.request_id} has computed tokens"
    for request in queues.holding():
        _check_owner(request, limits)
    for request in queues.paused:
        assert request.is_decoding, f"paused {request.request_id} is mid-prefill"


def _check_owner(request: Request, limits: SchedulerLimits) -> None:
    name = f"request {request.request_id}"
    assert request.running_slot is not None, f"{name} has no running state slot"
    assert request.computed_end < len(request.tokens), f"{name} has nothing left to compute"
    computed, known = request.computed_end, len(request.tokens)
    min_blocks = limits.blocks_for(computed if request.is_decoding else known)
    max_blocks = limits.blocks_for(known)
    assert min_blocks <= len(request.block_table) <= max_blocks, f"{name} owns {len(request.block_table)} blocks"


def _check_reservations(queues: Queues, cache: PrefixCache) -> None:
    snapshots = [(request, one) for request in queues for one in request.snapshots]
    if cache.states is None:
        assert not snapshots, "snapshots of a model without states"
        return
    assert len(snapshots) == cache.states.reserved_count, "a slot belongs to no snapshot"
    for request, snapshot in snapshots:
        assert cache.states.is_reserved(snapshot.block_hash), f"request {request.request_id} has no slot reserved"
        assert snapshot.position > request.computed_end, f"request {request.request_id} has passed its snapshot"
