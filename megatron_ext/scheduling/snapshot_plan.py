"""Which states a step should leave behind, in the order in which slots are given out for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from megatron_ext.prefix_cache.cache import PrefixCache
from megatron_ext.scheduling.chunk import Chunk
from megatron_ext.scheduling.plan import Admission, Deferral, SchedulerLimits, SnapshotRequest
from megatron_ext.scheduling.snapshots import prefill_positions


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
    wanted = [one.snapshot for one in deferrals if one.snapshot is not None]
    for chunk in sorted(chunks, key=lambda chunk: chunk.is_decode):  # a free slot is prefill's before decode's
        sequence = chunk.request.sequence
        is_current = chunk.request in matched or sequence.cache_epoch == cache.epoch
        if sequence.chain is not None and is_current:
            wanted += _of_chunk(chunk, matched.get(chunk.request, sequence.shared_end), limits)
    return tuple(wanted)


def _of_chunk(chunk: Chunk, shared_end: int, limits: SchedulerLimits) -> Iterator[SnapshotRequest]:
    request, size = chunk.request, limits.block_size
    if chunk.is_decode:
        if chunk.end % size == 0:
            digest, before = request.digests[chunk.end // size - 1], request.sequence.decode_snapshot
            yield SnapshotRequest(request, chunk.end, digest, is_optional=True, instead_of=before)
        return
    if limits.aligned_chunks:
        positions = [chunk.end] if chunk.end % size == 0 else []
    else:
        positions = prefill_positions(chunk.start, chunk.end, len(request.tokens), shared_end, size)
    for position in positions:
        yield SnapshotRequest(request, position, request.digests[position // size - 1])
