"""Chunks of prefills that have begun: where the next one ends."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_ext.scheduling.chunk import Chunk
from megatron_ext.scheduling.plan import SchedulerLimits
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.snapshots.snapshot_positions import cut_aligned, prefill_stops


def plan_continuations(begun: Iterable[tuple[Request, int]], limits: SchedulerLimits, tokens: int) -> list[Chunk]:
    """Plan the next chunks of prefills, in the order in which they began, within the budgets.

    Args:
        begun: Requests that are mid-prefill, each with the position up to which it is computed before the step.
        limits: Limits of the engine.
        tokens: Maximum tokens of all chunks together.
    """
    chunks: list[Chunk] = []
    for request, start in begun:
        if not limits.may_prefill(len(chunks), sum(chunk.length for chunk in chunks)):
            break
        end = chunk_end(request, start, request.sequence.shared_end, limits, tokens)
        if end > start:
            chunks.append(Chunk(request, start, end))
            tokens -= chunks[-1].length
    return chunks


def chunk_end(request: Request, start: int, shared_end: int, limits: SchedulerLimits, tokens: int) -> int:
    """Return the end of a prefill chunk from `start` of at most `tokens` tokens; `start` if it gets none."""
    length = len(request.tokens)
    end = min(length, start + max(0, tokens))
    audit = request.audit
    if audit is not None and start < audit.resume:  # the states there are compared
        end = min(end, audit.resume)
    if not limits.aligned_chunks or request.sequence.chain is None:
        return end
    cached = request.sequence.snapshot_plan.cached_end(shared_end // limits.block_size)
    stops = prefill_stops(length, cached * limits.block_size, limits.block_size)
    return cut_aligned(
        start, end, length, [*stops, *(one.position for one in request.sequence.snapshots)], limits.block_size
    )
