"""Snapshot planning: states that a step should leave, in the order in which slots are reserved for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from megatron_ext.prefix_cache.cache import PrefixCache
from megatron_ext.prefix_cache.snapshot_order import Rank
from megatron_ext.prefix_cache.state_index import SlotId, StateIndex
from megatron_ext.scheduling.chunk import Chunk
from megatron_ext.scheduling.plan import Admission, Deferral, SchedulerLimits, SnapshotRequest
from megatron_ext.scheduling.snapshots.snapshot_positions import Snapshot, prefill_positions

Placing = Callable[[SnapshotRequest, SlotId], SlotId]


def plan_snapshots(
    chunks: Sequence[Chunk],
    admissions: Iterable[Admission],
    deferrals: Iterable[Deferral],
    limits: SchedulerLimits,
    cache: PrefixCache,
) -> tuple[SnapshotRequest, ...]:
    """Plan snapshots for followers, then of prefills, then of decodes; slots are reserved in this order.

    A snapshot that exists or is being taken needs no slot (see `StateIndex.reserve`). These are known only after
    the step's blocks have been allocated, because an evicted block takes its snapshot along.

    Args:
        chunks: Chunks of the step, decodes first.
        admissions: Admissions of the step, with the cached blocks that they share.
        deferrals: Deferrals of the step; followers' deferrals name the snapshots that their leaders are to take.
        limits: Limits of the engine.
        cache: Prefix cache; says whether there are states at all, and the current epoch.
    """
    if cache.states is None:
        return ()
    size = limits.block_size
    matched = {one.request: len(one.matched) for one in admissions}
    for_followers = [one.snapshot for one in deferrals if one.snapshot is not None]
    of_prefills: list[SnapshotRequest] = []
    of_decodes: list[SnapshotRequest] = []
    for chunk in chunks:
        is_decode = chunk.is_decode
        if is_decode and chunk.end % size != 0:
            continue
        if chunk.drafts or not chunk.length:  # not accepted yet (see `Drafts.commit`), or nothing computed
            continue
        request = chunk.request
        if request.chain is None:
            continue
        if request.cache_epoch != cache.epoch and chunk.request not in matched:
            continue
        if is_decode:
            of_decodes.append(_of_decode(chunk, size))
        else:
            cached = request.snapshot_plan.cached_end(matched.get(chunk.request, request.shared_end // size))
            of_prefills += _of_prefill(chunk, cached * size, limits)
    return (*for_followers, *of_prefills, *of_decodes)


def _of_decode(chunk: Chunk, block_size: int) -> SnapshotRequest:
    request = chunk.request
    block_hash = request.block_hashes[chunk.end // block_size - 1]
    before = request.snapshot_plan.decode
    return SnapshotRequest(request, chunk.end, block_hash, Rank.OPTIONAL, instead_of=before)


def _of_prefill(chunk: Chunk, cached_end: int, limits: SchedulerLimits) -> Iterator[SnapshotRequest]:
    request, size = chunk.request, limits.block_size
    if limits.aligned_chunks:
        positions = [chunk.end] if chunk.end % size == 0 else []
    else:
        positions = prefill_positions(chunk.start, chunk.end, len(request.tokens), cached_end, size)
    for position in positions:
        yield SnapshotRequest(request, position, request.block_hashes[position // size - 1])


def reserve_snapshots(wanted: Iterable[SnapshotRequest], states: StateIndex, place: Placing | None = None) -> None:
    """Reserve slots for the snapshots of a step, in order; snapshots without a slot are left out.

    Args:
        wanted: Snapshots in order of priority.
        states: Index of the slots.
        place: Returns the slot in which a snapshot is written, given the reserved one; None for the reserved one.
    """
    for one in wanted:
        reserved = states.reserve(one.block_hash, one.rank, instead_of=one.instead_of)
        if reserved is None:
            continue
        request, slot = one.request, reserved if place is None else place(one, reserved)
        request.snapshots.append(Snapshot(one.position, one.block_hash, slot))
        if one.rank is Rank.OPTIONAL:
            request.snapshot_plan.decode = one.block_hash
        elif one.rank is Rank.ORDINARY:
            request.snapshot_plan.used.append(one.block_hash)
