"""Assertions on requests and on the blocks and slots that they own (between two steps)."""

from __future__ import annotations

from collections import Counter

from megatron_ext.prefix_cache.block_pool import BlockId
from megatron_ext.prefix_cache.cache import PrefixCache
from megatron_ext.scheduling.plan import SchedulerLimits
from megatron_ext.scheduling.queue import Queues
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.running_slots import RunningSlots


def check_ownership(queues: Queues, limits: SchedulerLimits, cache: PrefixCache, running_slots: RunningSlots) -> None:
    """Assert that blocks, slots and reservations are owned as the requests say, and that the queues are sound."""
    held = Counter(block for request in queues for block in request.block_table)
    for block in map(BlockId, range(cache.pool.total)):
        assert cache.pool.references(block) == held[block], f"block {block}: references and tables disagree"
    _check_reservations(queues, cache)
    slots = [request.sequence.running_slot for request in queues]
    running_slots.check([slot for slot in slots if slot is not None])
    for queue in (queues.waiting, queues.running, queues.paused):
        arrivals = [request.arrival for request in queue]
        assert arrivals == sorted(arrivals), f"out of order: {arrivals}"
    for request in queues:
        assert not request.is_ended, f"request {request.request_id} has ended and is still queued"
    for request in queues.waiting:
        assert not request.block_table, f"waiting {request.request_id} owns blocks"
        assert request.sequence.running_slot is None, f"waiting {request.request_id} owns a running state slot"
        assert request.computed_end == 0, f"waiting {request.request_id} has computed tokens"
    for request in queues.holding():
        _check_owner(request, limits)
    for request in queues.paused:
        assert request.is_decoding, f"paused {request.request_id} is mid-prefill"


def _check_owner(request: Request, limits: SchedulerLimits) -> None:
    name = f"request {request.request_id}"
    assert request.sequence.running_slot is not None, f"{name} has no running state slot"
    assert request.computed_end < len(request.tokens), f"{name} has nothing left to compute"
    computed, known = request.computed_end, len(request.tokens)
    min_blocks = limits.blocks_for(computed if request.is_decoding else known)
    max_blocks = limits.blocks_for(known)
    assert min_blocks <= len(request.block_table) <= max_blocks, f"{name} owns {len(request.block_table)} blocks"


def _check_reservations(queues: Queues, cache: PrefixCache) -> None:
    snapshots = [(request, one) for request in queues for one in request.sequence.snapshots]
    if cache.states is None:
        assert not snapshots, "snapshots of a model without states"
        return
    assert len(snapshots) == cache.states.reserved_count, "a slot belongs to no snapshot"
    for request, snapshot in snapshots:
        assert cache.states.is_reserved(snapshot.block_hash), f"request {request.request_id} has no slot reserved"
        assert snapshot.position > request.computed_end, f"request {request.request_id} has passed its snapshot"
