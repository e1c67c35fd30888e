"""Requests as the cache's hints see them: submitted, admitted, published, ended; docs/policies.md, "Hints"."""

from __future__ import annotations

from collections.abc import Sequence
from operator import ne

from megatron_ext.prefix_cache.block_pool import BlockId
from megatron_ext.prefix_cache.cache import PrefixCache
from megatron_ext.scheduling.plan import Admission, SchedulerLimits
from megatron_ext.scheduling.request import Request


def note_submission(request: Request, cache: PrefixCache) -> None:
    """Take note of a submitted request; the first one with hints makes the cache follow them."""
    given, params = request.params.cache_hints, request.params
    hints = cache.hints if given is None else cache.follow_hints()
    if hints is None:
        return
    hints.tick(request.submission.submitted_at)
    if given is not None:
        hints.end_sessions(params.cache_salt, given.ended_sessions)


def note_admission(admission: Admission, limits: SchedulerLimits, cache: PrefixCache) -> None:
    """Take note of an admitted request."""
    request = admission.request
    if cache.hints is not None and request.sequence.chain is not None:
        params = request.params
        restored = 0 if admission.restore is None else limits.blocks_for(admission.chunk.start)
        cache.hints.admit(request.request_id, params.cache_salt, params.cache_hints, admission.matched, restored)


def note_fork(request: Request, shared: Sequence[BlockId], cache: PrefixCache) -> None:
    """Take note of a fork, which shares blocks that are published by now."""
    if cache.hints is not None:
        params = request.params
        cache.hints.admit(request.request_id, params.cache_salt, params.cache_hints, shared, 0)


def note_published(request: Request, own: Sequence[BlockId], complete: int, cache: PrefixCache) -> None:
    """Take note that a request has published its blocks up to `complete`, the last ones computed in `own`.

    Blocks that were cached before have replaced its own ones in its table.
    """
    if cache.hints is None:
        return
    params, table = request.params, request.sequence.block_table[:complete]
    first = complete - len(own)
    known = first + sum(map(ne, table[first:], own))
    cache.hints.publish(request.request_id, params.cache_salt, params.cache_hints, table, known)


def note_loaded(salt: str | None, table: Sequence[BlockId], known: int, cache: PrefixCache) -> None:
    """Take note of blocks that came back from disk, which belong to all requests of their tenant.

    Args:
        salt: Cache salt of the tenant.
        table: Blocks of the prefix, from its start.
        known: Number of them that were in memory before.
        cache: Cache that has them.
    """
    if cache.hints is not None:
        cache.hints.publish(None, salt, None, table, known)


def note_end(request: Request, cache: PrefixCache) -> None:
    """Take note that a request has ended and released its blocks."""
    if cache.hints is not None:
        cache.hints.end(request.request_id, request.params.cache_salt, request.params.cache_hints)
