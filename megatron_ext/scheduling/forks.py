"""Forks: samples of a prompt that take over what the prefill of one of them has computed.

    source     |== full blocks ==|= partial =|  states    the step computes the last tokens of the prompt
    fork       |---- shared -----|-- copied -|  copied    in the same step: its first token from the same logits

A fork computes no prompt token. It enters with the step that ends the source's prefill: it owns a running state slot
and the block for its copy from then on, and shares the full blocks once they are published. A sample that finds no room
then, or whose token mask is missing, is admitted later like any other request.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from megatron_ext.prefix_cache.cache import PrefixCache
from megatron_ext.scheduling.chunk import Chunk
from megatron_ext.scheduling.counters import Counters
from megatron_ext.scheduling.explanation import Explanation, Why
from megatron_ext.scheduling.plan import Fork, SchedulerLimits, StepBudget
from megatron_ext.scheduling.prefix_wait.waiting_queue import Line, WaitingQueue
from megatron_ext.scheduling.queue import Queues
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.request_events import EventType
from megatron_ext.scheduling.running_slots import RunningSlots
from megatron_ext.scheduling.step import ScheduledStep


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
            if request.computed_end < request.prompt_length and request.sequence.cache_epoch == cache.epoch:
                self._add(request, begun.get(request))

    def add(self, chunk: Chunk) -> None:
        """Note the chunk of a request that this step admits."""
        self._add(chunk.request, chunk)

    def _add(self, request: Request, chunk: Chunk | None) -> None:
        group = request.submission.group
        if group is None or request.generated_count or request.sequence.chain is None:
            return
        if chunk is not None and chunk.end == request.prompt_length:
            self._sources.setdefault(group, chunk)
        else:
            self._computing.setdefault(group, request)

    def join_sleepers(self, line: Line, waiting: WaitingQueue) -> None:
        """Let samples be examined that sleep until a source of this step has computed their prefix."""
        for group, chunk in self._sources.items():
            followers = waiting.followers_of(chunk.request.request_id)
            line.join([one for one in followers if one.submission.group == group], after=chunk.request)

    def plan(self, request: Request, budget: StepBudget) -> tuple[Fork, StepBudget] | None:
        """Return the fork of a waiting request and the remaining budget; None if it does not fork now."""
        chunk = self._sources.get(request.submission.group)
        blocks = int(request.prompt_length % self._limits.block_size > 0)
        if chunk is None or not _may_fork(request, chunk.request) or budget.requests < 1 or blocks > budget.blocks:
            return None
        left = dataclasses.replace(budget, blocks=budget.blocks - blocks, requests=budget.requests - 1)
        return Fork(request, chunk, blocks), left

    def awaited_source(self, request: Request) -> Request | None:
        """Return the request that still computes the prompt of a waiting one, which a later step may fork from it."""
        group = request.submission.group
        source = None if group in self._sources else self._computing.get(group)
        return source if source is not None and _may_fork(request, source) else None


def _may_fork(request: Request, source: Request) -> bool:
    """Return whether a waiting request of the same group can take over what `source` computes of the prompt."""
    chain, params = request.sequence.chain, request.params
    assert source.sequence.chain is not None, "a source uses the cache"
    return (
        chain is not None
        and chain.root == source.sequence.chain.root
        and not request.generated_count
        and not params.wants_prompt_log_probs
        and params.num_tokens_to_generate > 0
    )


class Forks:
    """Part of the scheduler that applies and commits forks.

    Args:
        limits: Limits of the engine.
        cache: Prefix cache of the scheduler.
        queues: Queues of the scheduler.
        running_slots: Running state slots of the scheduler.
        counters: Counters of the scheduler.

    Attributes:
        pending: Forks of the step being computed.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        cache: PrefixCache,
        queues: Queues,
        running_slots: RunningSlots,
        counters: Counters,
    ) -> None:
        self._limits = limits
        self._cache = cache
        self._queues = queues
        self._running_slots = running_slots
        self._counters = counters
        self.pending: tuple[Fork, ...] = ()

    def apply(self, forks: tuple[Fork, ...]) -> None:
        """Admit the forks of a plan: each takes a running state slot, and a block for its copy of the partial one."""
        self.pending = forks
        for fork in forks:
            sequence = fork.request.sequence
            sequence.block_table = tuple(self._cache.allocate(fork.new_blocks))
            sequence.running_slot = self._running_slots.take()
            sequence.cache_epoch = self._cache.epoch
            self._queues.move(fork.request, self._queues.running)
            fork.request.timeline.note(EventType.ADD_CONTEXT)

    def take(self) -> list[Request]:
        """Return the requests of the forks of a step that has failed, and forget these."""
        requests = [fork.request for fork in self.pending]
        self.pending = ()
        return requests

    def commit(self, step: ScheduledStep, running: Mapping[int, Request]) -> list[Request]:
        """Let the forks of a step that was computed share the full blocks of their sources, which are published.

        Returns:
            Requests of the forks; their prompts are computed, and their first tokens known.
        """
        self.pending = ()
        return [self._commit(running[fork.request_id], running[fork.source_id]) for fork in step.forks]

    def _commit(self, request: Request, source: Request) -> Request:
        sequence, length, size = request.sequence, request.prompt_length, self._limits.block_size
        full = length // size
        shared = source.sequence.block_table[:full]
        self._cache.pin(shared)
        sequence.block_table = (*shared, *sequence.block_table)
        sequence.shared_end, sequence.published_blocks, sequence.computed_end = full * size, full, length
        self._counters.skipped_tokens += sequence.ledger.admit(length, full, size, None)
        self._counters.hits += 1
        self._counters.blocks_matched += full
        if full:
            self._cache.count_hit(shared[-1])
        if self._limits.explains:
            sequence.ledger.explanation = Explanation(Why.SKIPPED_ALL.value, length, full * size, length, size)
        return request
