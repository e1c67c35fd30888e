"""Opportunistic checkpoints: states that prefills leave in otherwise free slots, at boundaries not requested (SI-1).

Positions are chosen for the whole prompt when a request is admitted, because they depend on the number of slots. Each
step takes the checkpoints that its chunk passes, as far as slots are still free. Aligned chunks have none: every
boundary at which a chunk ends has a snapshot already.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from megatron_ext.prefix_cache.cache import PrefixCache
from megatron_ext.prefix_cache.matching import last_boundary
from megatron_ext.prefix_cache.snapshot_order import Rank
from megatron_ext.prefix_cache.state_index import StateIndex
from megatron_ext.scheduling.chunk import Chunk
from megatron_ext.scheduling.plan import Admission, SchedulerLimits, SnapshotRequest
from megatron_ext.scheduling.snapshots.placement import place


def place_opportunistic(
    admissions: Sequence[Admission],
    continued: Iterable[Chunk],
    wanted: Sequence[SnapshotRequest],
    limits: SchedulerLimits,
    cache: PrefixCache,
) -> list[Admission]:
    """Return the admissions with the positions of their opportunistic checkpoints, as far as slots are free.

    Args:
        admissions: Admissions of the step, in order: the first has the first choice.
        continued: Chunks of prefills that have begun and have planned checkpoints left.
        wanted: Other snapshots of the step, which get their slots first.
        limits: Limits of the engine.
        cache: Prefix cache, with the free slots.
    """
    if not admissions or not _is_on(limits, cache):
        return list(admissions)
    planned = sum(position > one.start for one in continued for position in one.request.snapshot_plan.opportunistic)
    free_slots = _free_slots(wanted, limits, cache.states) - planned
    placed = []
    for admission in admissions:
        positions = _positions(admission, free_slots, limits, cache)
        free_slots -= len(positions)
        placed.append(dataclasses.replace(admission, opportunistic=positions) if positions else admission)
    return placed


def plan_opportunistic(
    continued: Sequence[Chunk],
    admissions: Sequence[Admission],
    wanted: Sequence[SnapshotRequest],
    limits: SchedulerLimits,
    cache: PrefixCache,
) -> tuple[SnapshotRequest, ...]:
    """Return the planned checkpoints that the step's prefills pass, as far as slots are free after all others."""
    if not (continued or admissions) or not _is_on(limits, cache):
        return ()
    passed = passed_checkpoints(continued, limits, cache)
    for admission in admissions:
        passed += _passed(admission.chunk, admission.opportunistic, limits.block_size)
    free_slots = max(0, _free_slots(wanted, limits, cache.states))
    return tuple(passed[max(0, len(passed) - free_slots) :])  # the last ones are worth most


def passed_checkpoints(
    continued: Iterable[Chunk], limits: SchedulerLimits, cache: PrefixCache
) -> list[SnapshotRequest]:
    """Return the planned checkpoints that chunks of begun prefills pass, whether or not slots are free for them."""
    passed: list[SnapshotRequest] = []
    for chunk in continued if _is_on(limits, cache) else ():
        request = chunk.request
        if request.cache_epoch == cache.epoch:
            passed += _passed(chunk, request.snapshot_plan.opportunistic, limits.block_size)
    return passed


def _is_on(limits: SchedulerLimits, cache: PrefixCache) -> bool:
    return cache.states is not None and not limits.aligned_chunks and limits.opportunistic.max_slots != 0


def _free_slots(wanted: Sequence[SnapshotRequest], limits: SchedulerLimits, states: StateIndex | None) -> int:
    """Return the slots, within the limit, that are empty and not reserved for other snapshots of this step."""
    assert states is not None, "there are states"
    taken = sum(states.find(one.block_hash) is None and not states.is_reserved(one.block_hash) for one in wanted)
    free_slots, max_slots = states.free_count - taken, limits.opportunistic.max_slots
    return free_slots if max_slots is None else min(free_slots, max_slots - states.opportunistic_count)


def _positions(admission: Admission, free_slots: int, limits: SchedulerLimits, cache: PrefixCache) -> tuple[int, ...]:
    request, size = admission.request, limits.block_size
    if free_slots < 1 or request.chain is None:
        return ()
    declared = [position // size for position in request.params.cache_checkpoint]
    first, last = admission.chunk.start // size, last_boundary(len(request.tokens), size) // size
    blocks = place(first, last, free_slots, declared, limits.opportunistic)
    cached_end = request.snapshot_plan.cached_end(len(admission.matched))
    return tuple(block * size for block in blocks if block != cached_end)


def _passed(chunk: Chunk, positions: Sequence[int], size: int) -> Iterator[SnapshotRequest]:
    for position in positions:
        if chunk.start < position <= chunk.end:
            block_hash = chunk.request.block_hashes[position // size - 1]
            yield SnapshotRequest(chunk.request, position, block_hash, Rank.OPPORTUNISTIC)
