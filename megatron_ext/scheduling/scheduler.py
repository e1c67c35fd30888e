"""Applies plans: the one owner of queues, blocks and live rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from megatron_ext.prefix_cache.block_pool import BlockPool
from megatron_ext.scheduling.events import EventType
from megatron_ext.scheduling.planner import Admission, Limits, StepPlan, plan_step
from megatron_ext.scheduling.queue import Queues
from megatron_ext.scheduling.record import Status
from megatron_ext.scheduling.request import Chunk, Request
from megatron_ext.scheduling.rows import RowPool


class Scheduler:
    """Moves requests through their lives, one step at a time: `schedule`, then `commit` or `abandon`.

    Between the two the step's requests must not be touched by anybody else.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.queues = Queues()
        self.blocks = BlockPool(limits.total_blocks)
        self.rows = RowPool(limits.max_requests)
        self.eviction_count = 0
        self.pause_count = 0

    def add(self, request: Request) -> None:
        """Let an admissible request wait for its turn."""
        self.queues.waiting.add(request)

    def schedule(self) -> StepPlan:
        """Plan the next step and put the plan into effect; the caller computes the plan's chunks."""
        plan = plan_step(self.queues, self.limits, self.blocks.free_count)
        for request, error in plan.failures:
            self.end(request, Status.FAILED, error=f"the KV pool is too small for this request: {error}")
        for request in plan.evictions:
            self._requeue(request, EventType.EVICT)
            self.eviction_count += 1
        for request in plan.pauses:
            self.queues.move(request, self.queues.paused)
            request.add_event(EventType.PAUSE)
            self.pause_count += 1
        for request in plan.resumes:
            self.queues.move(request, self.queues.running)
        for chunk in plan.chunks:
            self._grow(chunk)
        for admission in plan.admissions:
            self._admit(admission)
        return plan

    def _grow(self, chunk: Chunk) -> None:
        request = chunk.request
        if request.block_table:  # admissions take theirs at once
            missing = self.limits.blocks_for(chunk.end) - len(request.block_table)
            request.block_table += self.blocks.allocate(max(0, missing))

    def _admit(self, admission: Admission) -> None:
        request = admission.request
        request.block_table = self.blocks.allocate(admission.blocks)
        request.state_row = self.rows.take()
        self.queues.move(request, self.queues.running)
        request.add_event(EventType.ADD_CONTEXT)

    def commit(self, chunks: Iterable[Chunk]) -> None:
        """The forward of `chunks` has succeeded."""
        for chunk in chunks:
            assert chunk.start == chunk.request.computed_end, (chunk.start, chunk.request.computed_end)
            chunk.request.advance(chunk.end)

    def abandon(self, chunks: Iterable[Chunk], reason: str) -> None:
        """The forward of `chunks` has failed: their pools hold anything now, so the requests start again."""
        for chunk in chunks:
            self._requeue(chunk.request, EventType.ERROR_TRANSIENT, reason)

    def end(
        self, request: Request, status: Status, *, finish_reason: str | None = None, error: str | None = None
    ) -> None:
        """A request leaves; what it owned is free at once."""
        self._release(request)
        self.queues.discard(request)
        request.end(status, finish_reason=finish_reason, error=error)

    def suspend(self) -> None:
        """The pools are about to lose their contents: everybody waits, and keeps its tokens."""
        for request in [*self.queues.running, *self.queues.paused]:
            self._requeue(request)

    def _requeue(self, request: Request, event: EventType | None = None, payload: str | None = None) -> None:
        self._release(request)
        self.queues.move(request, self.queues.waiting)
        if event is not None:
            request.add_event(event, payload)

    def _release(self, request: Request) -> None:
        self.blocks.release(request.block_table)
        request.block_table = []
        request.computed_end = 0
        if request.state_row is not None:
            self.rows.give_back(request.state_row)
            request.state_row = None

    def check(self) -> None:
        """Assert every invariant between requests and pools (between steps)."""
        self.blocks.check()
        held = Counter(block for request in self.queues for block in request.block_table)
        for block in range(self.blocks.total):
            assert self.blocks.references(block) == held[block], f"block {block}: references and tables disagree"
        self.rows.check([request.state_row for request in self.queues if request.state_row is not None])
        for queue in (self.queues.waiting, self.queues.running, self.queues.paused):
            arrivals = [request.arrival for request in queue]
            assert arrivals == sorted(arrivals), f"out of order: {arrivals}"
        for request in self.queues:
            assert not request.is_ended, f"request {request.request_id} has ended and is still queued"
        for request in self.queues.waiting:
            assert not request.block_table, f"waiting {request.request_id} owns blocks"
            assert request.state_row is None, f"waiting {request.request_id} owns a live row"
            assert request.computed_end == 0, f"waiting {request.request_id} has computed tokens"
        for request in [*self.queues.running, *self.queues.paused]:
            self._check_owner(request)
        for request in self.queues.paused:
            assert request.is_decoding, f"paused {request.request_id} is mid-prefill"

    def _check_owner(self, request: Request) -> None:
        name = f"request {request.request_id}"
        assert request.state_row is not None, f"{name} has no live row"
        assert request.computed_end < len(request.tokens), f"{name} has nothing left to compute"
        computed, known = request.computed_end, len(request.tokens)
        fewest = self.limits.blocks_for(computed if request.is_decoding else known)
        most = self.limits.blocks_for(known)
        assert fewest <= len(request.block_table) <= most, f"{name} owns {len(request.block_table)} blocks"
