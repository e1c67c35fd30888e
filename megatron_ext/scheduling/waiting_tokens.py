"""Prompt tokens that wait to be computed: the measure by which a fleet grows and shrinks."""

from __future__ import annotations

from megatron_ext.prefix_cache.matching import resume_point
from megatron_ext.scheduling.kept_data import usable_blocks
from megatron_ext.scheduling.planner import reads_cache
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.scheduler import Scheduler


def prompt_tokens_to_compute(scheduler: Scheduler) -> int:
    """Return the prompt tokens of living requests that are neither computed nor cached, between two steps.

    A prefix that several waiting requests have in common counts for each of them. O(living requests).
    """
    return sum(max(0, one.prompt_length - _done(one, scheduler)) for one in scheduler.queues)


def _done(request: Request, scheduler: Scheduler) -> int:
    """Return the position up to which a request is computed, or would be skipped if it was admitted now."""
    cache, size = scheduler.cache, scheduler.limits.block_size
    if request.computed_end or not reads_cache(request):
        return request.computed_end
    usable = usable_blocks(request, len(cache.match(request.block_hashes)), cache)
    return resume_point(len(request.tokens), request.block_hashes[:usable], size, cache.states, cache.depth_of).position
