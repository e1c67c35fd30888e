"""Which states a step should leave behind, in the order in which slots are given out for them."""

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
    """What followers wait for, then what prefills leave, then what decodes leave, as far as slots go.

    What is there already, or is being taken, takes no slot (see `StateIndex.reserve_all`); which snapshots those are
    is known when the step's blocks have been allocated, because an evicted block takes its snapshot along.

    Args:
        chunks: Of the step, decodes first.
        admissions: Of the step; what they match they share.
        deferrals: Those of followers say what their leaders are to leave.
        limits: The engine's.
        cache: To see whether there are states at all, and in which epoch.
    """
    if cache.states is None:
        return ()
    matched = {one.request: len(one.matched) * limits.block_size for one in admissions}
    for_followers = [one.snapshot for one in deferrals if one.snapshot is not None]
    of_prefills: list[SnapshotRequest] = []
    of_decodes: list[SnapshotRequest] = []
    for chunk in chunks:
        is_decode = chunk.is_decode
        if is_decode and chunk.end % limits.block_size != 0:
            continue
        if chunk.drafts:  # whether they come is not known; see `Drafts.commit`
            continue
        sequence = chunk.request.sequence
        if sequence.chain is None:
            continue
        if sequence.cache_epoch != cache.epoch and chunk.request not in matched:
            continue
        if is_decode:
            of_decodes.append(_of_decode(chunk, limits.block_size))
        else:
            of_prefills += _of_prefill(chunk, matched.get(chunk.request, sequence.shared_end), limits)
    return (*for_followers, *of_prefills, *of_decodes)


def _of_decode(chunk: Chunk, block_size: int) -> SnapshotRequest:
    request = chunk.request
    block_hash = request.block_hashes[chunk.end // block_size - 1]
    before = request.sequence.snapshot_plan.decode
    return SnapshotRequest(request, chunk.end, block_hash, Rank.OPTIONAL, instead_of=before)


def _of_prefill(chunk: Chunk, shared_end: int, limits: SchedulerLimits) -> Iterator[SnapshotRequest]:
    request, size = chunk.request, limits.block_size
    if limits.aligned_chunks:
        positions = [chunk.end] if chunk.end % size == 0 else []
    else:
        positions = prefill_positions(chunk.start, chunk.end, len(request.tokens), shared_end, size)
    for position in positions:
        yield SnapshotRequest(request, position, request.block_hashes[position // size - 1])
