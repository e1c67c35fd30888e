"""Requests, limits and queues in any situation, in a line each."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Iterable, Mapping

from megatron_ext.config import RequestParams
from megatron_ext.prefix_cache.cache import PrefixCache
from megatron_ext.prefix_cache.hash_chain import BlockHash
from megatron_ext.scheduling.plan import SchedulerLimits, StepPlan
from megatron_ext.scheduling.queue import Queues
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.request_inputs import RequestInputs
from megatron_ext.scheduling.scheduler import Scheduler
from megatron_ext.scheduling.step import describe_step
from megatron_ext.scheduling.waiting_order import WaitingOrder

# Blocks of 4 tokens, so that sizes are easy to follow by hand.
LIMITS = SchedulerLimits(
    block_size=4,
    total_blocks=8,
    paused_blocks=None,
    max_requests=4,
    max_tokens=16,
    max_sequence_length=64,
    chunked_prefill=True,
)


def make_limits(**changes: object) -> SchedulerLimits:
    """`LIMITS`, with some of them changed."""
    return dataclasses.replace(LIMITS, **changes)


def make_request(arrival: int, prompt: int, generated: int = 0, **params: object) -> Request:
    """A request with tokens 1000 * arrival + position; nothing is computed, nothing owned."""
    tokens = tuple(1000 * arrival + position for position in range(prompt))
    request = Request(100 + arrival, RequestInputs(tokens, RequestParams(**params)), arrival=arrival, seed=arrival)
    for position in range(prompt, prompt + generated):
        request.append(1000 * arrival + position)
    return request


class Situation:
    """Queues that are filled by hand; block and slot numbers are handed out in order."""

    def __init__(self, **limits: object) -> None:
        self.limits = make_limits(**limits)
        self.cache = PrefixCache(self.limits.total_blocks, None)
        self.queues = Queues(self.cache, WaitingOrder())
        self._used_slots = 0

    @property
    def free_blocks(self) -> int:
        return self.cache.available_count

    def waiting(self, arrival: int, prompt: int, generated: int = 0) -> Request:
        request = make_request(arrival, prompt, generated)
        self.queues.waiting.add(request)
        return request

    def prefilling(self, arrival: int, prompt: int, computed: int, generated: int = 0) -> Request:
        """Owns the blocks of all its tokens, as every request that was admitted does."""
        request = make_request(arrival, prompt, generated)
        self._own(request, computed, self.limits.blocks_for(len(request.tokens)))
        self.queues.running.add(request)
        return request

    def decoding(self, arrival: int, prompt: int, generated: int) -> Request:
        """All is computed but the last token, which may need a block that is not there yet."""
        request = self._decoder(arrival, prompt, generated)
        self.queues.running.add(request)
        return request

    def paused(self, arrival: int, prompt: int, generated: int) -> Request:
        request = self._decoder(arrival, prompt, generated)
        self.queues.paused.add(request)
        return request

    def _decoder(self, arrival: int, prompt: int, generated: int) -> Request:
        request = make_request(arrival, prompt, generated)
        computed = len(request.tokens) - 1
        self._own(request, computed, self.limits.blocks_for(computed))
        return request

    def _own(self, request: Request, computed: int, blocks: int) -> None:
        request.computed_end = computed
        request.block_table = tuple(self.cache.allocate(blocks))
        request.running_slot = self._used_slots
        self._used_slots += 1


def frozen(queues: Queues) -> list[list[tuple[int, bytes]]]:
    """Deep copy of all contents of the queues and their requests, for later comparison."""
    return [
        [(id(request), pickle.dumps(vars(request))) for request in queue]
        for queue in (queues.waiting, queues.running, queues.paused)
    ]


def request_of(arrival: int, tokens: Iterable[int], end: int | None = None, **params: object) -> Request:
    """A request of these tokens, its id its arrival; `end` is its termination token."""
    inputs = RequestInputs(tuple(tokens), RequestParams(**params))
    return Request(arrival, inputs, arrival, arrival, end_ids=() if end is None else (end,))


def add(scheduler: Scheduler, *requests: Request) -> None:
    """Let them wait."""
    for request in requests:
        scheduler.add(request)


def step(scheduler: Scheduler) -> StepPlan:
    """Schedule and commit."""
    plan = scheduler.schedule()
    commit(scheduler, plan)
    scheduler.check()
    return plan


def commit(scheduler: Scheduler, plan: StepPlan, sampled: Mapping[int, int] | None = None) -> list[Request]:
    """Commit a computed step. Each request due a token gets a unique one, or that of `sampled`."""
    due = [chunk.request for chunk in plan.chunks if chunk.yields_token]
    tokens = {request.request_id: 1000 * (request.arrival + 1) + len(request.tokens) for request in due}
    return scheduler.commit(describe_step(plan.chunks, scheduler.limits.block_size), tokens | dict(sampled or {}))


def admitted(plan: StepPlan) -> list[tuple[int, int, int]]:
    """(request, matched blocks, new blocks) of each admission."""
    return [(one.request.request_id, len(one.matched), one.new_blocks) for one in plan.admissions]


def followers(plan: StepPlan) -> dict[int, int]:
    """Leaders by follower."""
    return {one.request.request_id: one.wait_for for one in plan.deferrals if one.wait_for is not None}


def asleep(scheduler: Scheduler) -> dict[int, int]:
    """Leaders by sleeping follower; sleeping requests are not looked at."""
    return {request.request_id: prefix_wait.leader for request, prefix_wait in scheduler.queues.waiting.sleepers()}


def cache_blocks_with_snapshots(cache: PrefixCache, count: int) -> None:
    """Cache blocks that no request uses, each with a snapshot."""
    hashes = [BlockHash(bytes([i]) * 32) for i in range(count)]
    cache.release(cache.publish(hashes, cache.allocate(count), None))
    for block_hash in hashes:
        assert cache.states.reserve(block_hash) is not None
        cache.states.commit(block_hash)
