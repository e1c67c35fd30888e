"""Snapshot planning: states that a step should leave, in the order in which slots are reserved for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from megatron_ext.prefix_cache.cache import PrefixCache
from megatron_ext.prefix_cache.snapshot_order import Rank
from megatron_ext.scheduling.chunk import Chunk
from megatron_ext.scheduling.plan import Admission, Deferral, SchedulerLimits, SnapshotRequest
from megatron_ext.scheduling.snapshots.snapshot_positions import prefill_positions


def plan_snapshots(
    chunks: Sequence[Chunk],
    admissions: Iterable[Admission],
    deferrals: Iterable[Deferral],
    limits: SchedulerLimits,
    cache: PrefixCache,
) -> tuple[SnapshotRequest, ...]:
    """Plan snapshots for followers, then of prefills, then of decodes; slots are reserved in this order.

    A snapshot that exists or is being taken needs no slot (see `StateIndex.reserve_all`). These are known only after
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
        sequence = chunk.request.sequence
        if sequence.chain is None:
            continue
        if sequence.cache_epoch != cache.epoch and chunk.request not in matched:
            continue
        if is_decode:
            of_decodes.append(_of_decode(chunk, size))
        else:
            cached = sequence.snapshot_plan.cached_end(matched.get(chunk.request, sequence.shared_end // size))
            of_prefills += _of_prefill(chunk, cached * size, limits)
    return (*for_followers, *of_prefills, *of_decodes)


def _of_decode(chunk: Chunk, block_size: int) -> SnapshotRequest:
    request = chunk.request
    block_hash = request.block_hashes[chunk.end // block_size - 1]
    before = request.sequence.snapshot_plan.decode
    return SnapshotRequest(request, chunk.end, block_hash, Rank.OPTIONAL, instead_of=before)


def _of_prefill(chunk: Chunk, cached_end: int, limits: SchedulerLimits) -> Iterator[SnapshotRequest]:
    request, size = chunk.request, limits.block_size
    if limits.aligned_chunks:
        positions = [chunk.end] if chunk.end % size == 0 else []
    else:
        positions = prefill_positions(chunk.start, chunk.end, len(request.tokens), cached_end, size)
    for position in positions:
        yield SnapshotRequest(request, position, request.block_hashes[position // size - 1])
