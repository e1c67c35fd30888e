"""Forks: samples of a prompt that take over what the prefill of one of them has computed.

    source     |== full blocks ==|= partial =|  states    the step computes the last tokens of the prompt
    fork       |---- shared -----|-- copied -|  copied    in the same step: its first token from the same logits

A fork computes no prompt token. It is admitted to the step that ends the source's prefill, with an empty chunk at the
end of the prompt: from then on it shares the full blocks, and owns a running state slot and the block for its copy. A
sample that finds no room then, or whose token mask is missing, is admitted later like any other request.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from megatron_ext.prefix_cache.cache import PrefixCache
from megatron_ext.scheduling.chunk import Chunk
from megatron_ext.scheduling.plan import Admission, SchedulerLimits, StepBudget
from megatron_ext.scheduling.prefix_wait.waiting_queue import WaitingQueue
from megatron_ext.scheduling.queue import Queues
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.waiting_order import Line


class ForkPlanner:
    """Forks of one plan.

    Args:
        queues: Queues of the scheduler.
        chunks: Chunks of running requests in the step.
        limits: Limits of the engine.
        cache: Prefix cache.
    """

    def __init__(self, queues: Queues, chunks: Iterable[Chunk], limits: SchedulerLimits, cache: PrefixCache) -> None:
        self._limits = limits
        self._cache = cache
        self._sources: dict[int | None, Chunk] = {}  # by group: the chunks that end a prompt in this step
        self._computing: dict[int | None, Request] = {}  # by group: requests whose prompt is computed after this step
        begun = {chunk.request: chunk for chunk in chunks}
        for request in queues.running:
            if request.computed_end < request.prompt_length and request.cache_epoch == cache.epoch:
                self._add(request, begun.get(request))

    def add(self, chunk: Chunk) -> None:
        """Note the chunk of a request that this step admits."""
        self._add(chunk.request, chunk)

    def _add(self, request: Request, chunk: Chunk | None) -> None:
        group = request.group
        if group is None or request.generated_count or request.chain is None:
            return
        if chunk is not None and chunk.end == request.prompt_length:
            self._sources.setdefault(group, chunk)
        else:
            self._computing.setdefault(group, request)

    def join_sleepers(self, line: Line, waiting: WaitingQueue) -> None:
        """Let samples be examined that sleep until a source of this step has computed their prefix."""
        for group, chunk in self._sources.items():
            followers = waiting.followers_of(chunk.request.request_id)
            line.join([one for one in followers if one.group == group])

    def plan(self, request: Request, budget: StepBudget) -> tuple[Admission, StepBudget] | None:
        """Return the fork of a waiting request and the remaining budget; None if it does not fork now."""
        source = self._sources.get(request.group)
        length, size = request.prompt_length, self._limits.block_size
        blocks = int(length % size > 0)
        if source is None or not _may_fork(request, source.request) or budget.requests < 1 or blocks > budget.blocks:
            return None
        left = dataclasses.replace(budget, blocks=budget.blocks - blocks, requests=budget.requests - 1)
        chunk = Chunk(request, length, length, source=source)
        return Admission(request, (), blocks, chunk, usable_blocks=length // size), left

    def awaited_source(self, request: Request) -> Request | None:
        """Return the request that still computes the prompt of a waiting one, which a later step may fork from it."""
        group = request.group
        source = None if group in self._sources else self._computing.get(group)
        return source if source is not None and _may_fork(request, source) else None


def _may_fork(request: Request, source: Request) -> bool:
    """Return whether a waiting request of the same group can take over what `source` computes of the prompt."""
    chain, params = request.chain, request.params
    assert source.chain is not None, "a source uses the cache"
    return (
        chain is not None
        and chain.root == source.chain.root
        and not request.generated_count
        and not params.wants_prompt_log_probs
        and params.num_tokens_to_generate > 0
    )


def share_published(request: Request, source: Request, cache: PrefixCache) -> None:
    """Let a fork share the full blocks of its source as they are after their publication, and count the hit.

    Another request may have published equal blocks before: then the source uses those by now.
    """
    full = request.published_blocks
    own, published = request.block_table[:full], source.block_table[:full]
    if own != published:
        cache.pin(published)
        cache.release(own)
        request.block_table = (*published, *request.block_table[full:])
    if full:
        cache.count_hit(published[-1])
