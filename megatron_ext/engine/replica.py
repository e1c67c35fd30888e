"""Model replica in the engine core: plan, execute and commit its steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from megatron_ext.engine.async_scheduling import AsyncScheduling, InFlightStep
from megatron_ext.engine.cache_audit import CacheAudit
from megatron_ext.engine.disk_loading import DiskLoading
from megatron_ext.engine.error_isolation import ErrorIsolation
from megatron_ext.engine.executor import Executor
from megatron_ext.engine.input_processor import InputSettings
from megatron_ext.engine.output_processor import OutputProcessor
from megatron_ext.engine.result import ReplicaStep
from megatron_ext.engine.routing_recorder import take_cached_rows
from megatron_ext.engine.structured_output import StructuredOutputManager
from megatron_ext.errors import RestoreError, describe
from megatron_ext.prefix_cache.hash_chain import BlockHash
from megatron_ext.scheduling.chunk import Chunk
from megatron_ext.scheduling.plan import StepPlan
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.scheduler import Scheduler
from megatron_ext.scheduling.spec_decode.verification import NO_TOKENS
from megatron_ext.speculation.proposals import Proposals


class Replica:
    """Scheduler and executor of one copy of the model.

    If a step's execution raises, its requests are requeued and the error is passed on; the commit cannot fail.

    Args:
        scheduler: Scheduler without requests.
        executor: Executor of steps; another replica's executor on rank 0 waits for that replica's result.
        input_settings: Settings of the input processor, with the grammar matcher.
        output: Output processor; receives requests that end in a step, and reports them.
        error_isolation: Counts errors outside of steps.
        proposals: Drafts for decoding requests (SP-1); None without speculation.

    Attributes:
        structured_outputs: Structured outputs of the requests.
        audit: Audits of the prefix cache; None if no hits are audited.
        loading: Loads of cached entries from disk; None without a directory.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        input_settings: InputSettings,
        output: OutputProcessor,
        error_isolation: ErrorIsolation,
        proposals: Proposals | None,
    ) -> None:
        self.scheduler = scheduler
        self._executor = executor
        self._output = output
        self._error_isolation = error_isolation
        self._proposals = proposals
        self._drafts = NO_TOKENS  # proposals for the step that is planned next
        self._in_flight: InFlightStep | None = None  # the next step, if it has been launched
        self._last_seconds: float | None = 0.0  # of the step before; None if nothing was computed
        self.structured_outputs = StructuredOutputManager(scheduler, input_settings.matcher, input_settings.mask_thread)
        self.audit = CacheAudit(scheduler) if scheduler.limits.audit_interval else None
        if self.audit is not None:
            scheduler.admission_observers.append(self.audit.note_admission)
        if scheduler.limits.keeps_routing:
            scheduler.admission_observers.append(
                partial(take_cached_rows, cache=scheduler.cache, block_size=scheduler.limits.block_size)
            )
        self.loading: DiskLoading | None = None
        self.async_scheduling = AsyncScheduling(scheduler, executor, is_on=proposals is None)

    def propose(self) -> None:
        """Call the drafter for the next step and begin missing masks, unless that step has been launched.

        An error of the drafter costs its drafts only.
        """
        self._in_flight = self.async_scheduling.take()
        if self._in_flight is not None:
            return
        self._drafts = NO_TOKENS
        if self._proposals is not None:
            with self._error_isolation.guard("the drafter"):
                self._drafts, errors = self._proposals.propose(self.scheduler)
                for error in errors:
                    self._error_isolation.note("the drafter", error, once=True)
        self.structured_outputs.begin(self._drafts)

    @property
    def has_other_work(self) -> bool:
        """True if the next step may compute something for requests that wait for no mask."""
        return self._last_seconds is not None and self.structured_outputs.has_other_work

    def prepare(self, share: float, *, is_idle: bool) -> None:
        """Wait for masks within bounds; pass finished masks and the drafts to the scheduler (SE-10).

        An audit of the cache begins here, too, so that the commands to other ranks include it.

        Args:
            share: Share of the maximum wait that this replica may use.
            is_idle: True if no replica has other work.
        """
        if self.loading is not None:
            self.loading.follow()
        if self._in_flight is not None:
            return
        if self.audit is not None:
            self.audit.begin()
        self.structured_outputs.wait(share * (self._last_seconds or 0.0), has_other_work=not is_idle)
        for request, ready in list(self.structured_outputs.take()):
            if isinstance(ready, BaseException):
                self._output.refuse(request, ready)
            else:
                self.scheduler.allow(request, ready)
        if drafts := self.structured_outputs.allowed_drafts(self._drafts):
            self.scheduler.propose(drafts)
        if self.loading is not None:
            self.loading.decide(may_wait=is_idle or share == 1)

    def compute(self, host_work: Callable[[], None]) -> ReplicaStep:
        """Plan, execute and commit one step, after `propose` and `prepare`.

        If the executor supports it, the next step is launched before the tokens of this one are read.

        Args:
            host_work: Function to call while the device computes; it may add requests, and change nothing else.
        """
        in_flight, self._in_flight = self._in_flight, None
        plan = self._plan() if in_flight is None else in_flight.plan
        if not plan.chunks:
            alive = list(self.scheduler.queues)
            # Only what arrives from outside the scheduler, a mask or an entry on disk, may leave a step empty.
            are_held = any(one.lacks_mask or self.scheduler.waits_for_disk(one) for one in alive)
            assert not alive or are_held, "requests are alive, but none can run"
            self._last_seconds = None
            self._executor.idle()
            return ReplicaStep((), None)
        planned = time.perf_counter()
        try:
            in_flight = in_flight or self._launch(plan)
            self.async_scheduling.launch_next(in_flight)  # before tokens are read: the device has no pause
            with self._error_isolation.guard("what the host does while a step is computed"):
                host_work()
            result = in_flight.result()
        except BaseException as error:
            self._abandon(plan.chunks, in_flight, error)
            raise
        for chunk in in_flight.chunks:  # with the version at the launch: weights may have changed since
            chunk.request.versions.compute(chunk.request.generated_count, in_flight.weights_version)
        ended = self.scheduler.commit(in_flight.step, result.tokens, result.target_tokens)
        self._output.ended += [request for request in ended if request.audit is None]
        if self.audit is not None:
            with self._error_isolation.guard("an audit of the prefix cache"):
                self.audit.note_step(plan.chunks, result.differences, time.perf_counter() - planned)
        self._last_seconds = time.perf_counter() - planned
        if self.loading is not None:
            self.loading.note_step(in_flight.chunks, self._last_seconds)
        if self._proposals is not None:
            with self._error_isolation.guard("the drafter"):
                self._proposals.update(self.scheduler.drafts.verified)
        else:  # the next step has no drafts
            self.structured_outputs.begin(NO_TOKENS)
        return ReplicaStep(plan.chunks, result)

    def _plan(self) -> StepPlan:
        plan = self.scheduler.schedule()
        for admission in plan.admissions:
            admission.request.versions.admit(self.async_scheduling.weights_version)
        return plan

    def _launch(self, plan: StepPlan) -> InFlightStep:
        step = self.scheduler.describe(plan)
        return InFlightStep(plan, step, self._executor.launch(step), self.async_scheduling.weights_version)

    def _abandon(self, chunks: Sequence[Chunk], in_flight: InFlightStep | None, error: BaseException) -> None:
        """Requeue the requests of a failed step, and drop the step launched after it."""
        self.async_scheduling.drop(in_flight)
        self.scheduler.abandon(chunks, describe(error))
        if isinstance(error, RestoreError):  # the next step computes what this snapshot was to save
            states = self.scheduler.cache.states
            assert states is not None, "only states are restored"
            states.drop(BlockHash(error.block_hash))

    def forget(self, ended: Sequence[Request]) -> None:
        """Drop all state of requests that have been reported."""
        self.async_scheduling.forget_discarded()
        self.structured_outputs.forget(ended)
        if self._proposals is not None:
            with self._error_isolation.guard("the drafter"):
                self._proposals.forget(ended)

    def weights_changed(self, version: int, *, restarts: bool) -> None:
        """Invalidate everything cached with the old weights.

        Args:
            version: Version of the new weights.
            restarts: Whether requests in the batch start again with their tokens; if not, they go on with what the old
                weights computed, a step that is in flight included.
        """
        self.async_scheduling.synchronize()
        if restarts:
            self.async_scheduling.drop()
        self.async_scheduling.weights_version = version
        if self.audit is not None:
            self.audit.forget()
        self.scheduler.weights_changed(restarts=restarts)

    def suspend(self) -> None:
        """Requeue all requests and forget cached blocks before the pools are freed."""
        self.async_scheduling.synchronize()
        self.async_scheduling.drop()
        if self.audit is not None:
            self.audit.forget()
        self.scheduler.suspend()

    def close(self) -> None:
        """Wait until the device is idle."""
        self.async_scheduling.synchronize()
        self.async_scheduling.drop()
