"""The engine's own part of a step: schedule, execute, commit, output."""

from __future__ import annotations

import time
from asyncio import Future
from collections.abc import Callable, Sequence

from megatron_ext.config import RequestParams
from megatron_ext.engine.ahead import Ahead
from megatron_ext.engine.executor import Executor, launcher
from megatron_ext.engine.faults import Faults, describe
from megatron_ext.engine.flight import Flight
from megatron_ext.engine.intake import Door, Intake
from megatron_ext.engine.output import OutputProcessor
from megatron_ext.engine.result import NO_STEP, Step
from megatron_ext.engine.statistics import EngineStatistics, log_step
from megatron_ext.engine.structured_output import StructuredOutputs
from megatron_ext.errors import ConfigError, RestoreError
from megatron_ext.prefix_cache.block_index import CachedPrefix
from megatron_ext.prefix_cache.hash_chain import Digest
from megatron_ext.scheduling.chunk import Chunk
from megatron_ext.scheduling.counters import Counters
from megatron_ext.scheduling.plan import StepPlan
from megatron_ext.scheduling.planner import check_admissible
from megatron_ext.scheduling.record import RequestRecord, Status
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.scheduler import Scheduler
from megatron_ext.scheduling.step import describe_step
from megatron_ext.scheduling.verification import NO_TOKENS
from megatron_ext.speculation.proposals import Proposals


class Engine:
    """Takes requests in, computes them step by step, hands records out.

    A step is `compute`, then `report`. What raises while a step is executed sends its requests back to wait; the commit
    cannot fail; what raises after it ends at most the request that it was for (see `OutputProcessor`).

    Args:
        scheduler: Without requests.
        executor: Computes steps.
        door: What requests are made with.
        faults: Told what goes wrong beside steps; by default the engine's own.
        proposals: Of drafts for requests that decode (SP-1); None has none.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        door: Door,
        faults: Faults | None = None,
        proposals: Proposals | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.faults = faults or Faults("the engine")
        self.intake = Intake(door)
        self.output = OutputProcessor(scheduler, door.vocabulary, self.faults)
        self.step_count = 0
        self.while_computing: Callable[[], None] = lambda: None  # may add requests, and do nothing else
        self._executor, self._launch, self._proposals = executor, launcher(executor), proposals
        self._structured = StructuredOutputs(scheduler, door.matcher, door.mask_thread)
        self._drafts = NO_TOKENS  # proposed for the step that is planned next
        self._last_seconds: float | None = 0.0  # of the step before; None if nothing was computed
        self._ahead = Ahead(scheduler, executor, is_on=proposals is None)

    # Requests come and go

    def tokenize(self, prompt: str | Sequence[int], add_bos: bool = False) -> tuple[int, ...]:
        """See `Intake.tokenize`."""
        return self.intake.tokenize(prompt, add_bos)

    def add(
        self,
        request_id: int,
        tokens: tuple[int, ...],
        params: RequestParams,
        future: Future[RequestRecord],
        *,
        text: str | None = None,
        turn: int | None = None,
    ) -> None:
        """Queue a request. What can never be served ends at once, as FAILED; the others go on.

        Args:
            request_id: Not in use by a living request.
            tokens: Of its prompt; see `Intake.tokenize`.
            params: How it is sampled, and what it asks for.
            future: Of its record.
            text: Of the prompt, if it was one.
            turn: For engines of several replicas, see `Fleet`; here all are served by the same one.

        Raises:
            ConfigError: The id is in use.
        """
        self.check_free(request_id)
        request = self.intake.make(request_id, tokens, params, text)
        error = check_admissible(request, self.scheduler.limits)
        if error is None:
            self.scheduler.add(request)
            self._structured.add(request)
        else:
            request.end(Status.FAILED, error=f"this prompt cannot be served: {error}")
            self.output.ended.append(request)
        self.output.open(request, future)

    def check_free(self, request_id: int) -> None:
        """See that no living request has this id.

        Raises:
            ConfigError: One has.
        """
        if request_id in self.output:
            raise ConfigError(f"request id {request_id} is in use; choose another")

    def abort(self, request_id: int) -> bool:
        """End a request now; its blocks and its live slot are free at once (EX-8). Others do not notice.

        Returns:
            Whether it was alive; it may have ended, and be still to be reported.

        Raises:
            KeyError: Nobody has this id.
        """
        request = self.output.get(request_id)
        if request.is_ended:
            return False
        self.scheduler.end(request, Status.ABORTED)
        self.output.ended.append(request)
        return True

    def fail(self, request_id: int, error: Exception) -> None:
        """End a request as FAILED, because what only it needed has raised. Others do not notice.

        Raises:
            KeyError: Nobody has this id.
        """
        self.output.fail(self.output.get(request_id), error)

    def get(self, request_id: int) -> Request:
        """A living request, or one that has ended and is still to be reported.

        Raises:
            KeyError: Nobody has this id.
        """
        return self.output.get(request_id)

    @property
    def is_busy(self) -> bool:
        """Whether a step would do or report anything."""
        return bool(self.output)

    def cancel(self) -> None:
        """Forget all requests; their futures are cancelled, and the engine is not used any more."""
        self._ahead.drop()
        self._structured.forget(self.output.requests())
        self.output.cancel()

    def waiting(self) -> Sequence[Request]:
        """Those that wait for admission, and ended ones still to be reported by a step."""
        return [*self.scheduler.queues.waiting, *self.output.ended]

    # Steps

    @property
    def no_step(self) -> Step:
        """In which nothing was planned."""
        return NO_STEP

    def propose(self) -> None:
        """Ask the drafter, if any, for the next step; begin missing masks. A wrong answer costs its drafts only."""
        self._drafts = NO_TOKENS
        if self._proposals is not None:
            with self.faults.absorbed("the drafter"):
                self._drafts, errors = self._proposals.ask(self.scheduler)
                for error in errors:
                    self.faults.note("the drafter", error, once=True)
        self._structured.begin(self._drafts)

    @property
    def has_other_work(self) -> bool:
        """Whether the next step may compute something for requests that wait for no mask."""
        return self._last_seconds is not None and self._structured.has_other_work

    def prepare(self, share: float = 1.0, *, is_idle: bool) -> None:
        """Wait for masks within bounds, and give the scheduler those that are ready, and the drafts (SE-10).

        Args:
            share: Of the longest wait; the engines of a fleet share it.
            is_idle: Whether there is no other work.
        """
        self._structured.wait(share * (self._last_seconds or 0.0), has_other_work=not is_idle)
        ready = self._structured.take()
        for request, error in ready.errors:
            self.output.refuse(request, error)
        for request, masks in ready.masks:
            self.scheduler.allow(request, masks)
        if drafts := self._structured.allowed_drafts(self._drafts):
            self.scheduler.propose(drafts)

    def compute(self, *, is_prepared: bool = False) -> Step:
        """Plan, execute and commit one step.

        Where the executor can, the next step is launched before the tokens of this one are waited for. If executing
        raises, the step's requests go back to wait (their pools may hold anything) and the error is passed on; a later
        step computes them again. Nothing of a step that was launched behind it counts then.
        """
        started = time.perf_counter()
        flight = self._ahead.take()
        if flight is None and not is_prepared:
            self.propose()
            self.prepare(is_idle=not self.has_other_work)
        plan = self._plan() if flight is None else flight.plan
        if not plan.chunks:
            are_held = {request.lacks_mask for request in self.scheduler.queues}
            assert not are_held or True in are_held, "requests are alive, but none can run"
            self._last_seconds = None
            self._executor.idle()
            return Step(plan, None, 0.0)
        planned = time.perf_counter()
        try:
            flight = flight or self._take_off(plan)
            self._ahead.launch_behind(flight)
            self._use_the_wait()
            result = flight.result()
        except BaseException as error:
            self._abandon(plan.chunks, flight, error)
            raise
        self.output.ended += self.scheduler.commit(flight.step, result.tokens, result.behind_drafts)
        self.step_count, self._last_seconds = self.step_count + 1, time.perf_counter() - planned
        if self._proposals is not None:
            with self.faults.absorbed("the drafter"):
                self._proposals.tell(self.scheduler.drafts.verified)
        else:  # no draft is to come
            self._structured.begin(NO_TOKENS)
        return Step(plan, result, time.perf_counter() - started)

    def _plan(self) -> StepPlan:
        plan = self.scheduler.schedule()
        self.output.ended += [request for request, _ in plan.failures]
        return plan

    def _take_off(self, plan: StepPlan) -> Flight:
        step = describe_step(plan.chunks, self.scheduler.limits.block_size)
        return Flight(plan, step, self._launch(step))

    def _abandon(self, chunks: Sequence[Chunk], flight: Flight | None, error: BaseException) -> None:
        """A step has failed, and who is in the one behind it is in this one, too."""
        self._ahead.drop(flight)
        self.scheduler.abandon(chunks, describe(error))
        if isinstance(error, RestoreError):  # the next step computes what this snapshot was to save
            states = self.scheduler.cache.states
            assert states is not None, "only states are restored"
            states.drop(Digest(error.digest))

    def _use_the_wait(self) -> None:
        """While a step is computed: hash what waits, and take in who has come (CU-6).

        Nothing here may touch what the step is computed from: no plan, no end of a request, no change of the cache.
        """
        with self.faults.absorbed("what the host does while a step is computed"):
            self.scheduler.hash_ahead()
            self.while_computing()

    def report(self, step: Step, logging_interval: int = 0) -> list[RequestRecord]:
        """Turn a step's tokens into output; nothing in here raises.

        Args:
            step: That has been computed.
            logging_interval: Log a line every so many steps; 0 is never.

        Returns:
            Records of all that have ended since the last report.
        """
        if step.result is not None:
            self.output.take([chunk.request for chunk in step.plan.chunks], step.result)
        ended = list(self.output.ended)
        records = self.output.report()
        self._ahead.forget_void()
        self._structured.forget(ended)
        if self._proposals is not None:
            with self.faults.absorbed("the drafter"):
                self._proposals.forget(ended)
        if logging_interval and step.plan.chunks and self.step_count % logging_interval == 0:
            with self.faults.absorbed("the log line of a step"):
                log_step(self.statistics(), step.chunks, step.seconds)
        return records

    replicas = 1  # of the model; see `Fleet`
    heartbeat = None  # seconds after which `idle` is due; nobody waits to hear of this one

    def idle(self) -> None:
        """Nothing is to be done for now; other ranks, if there are any, are told so."""

    def close(self) -> None:
        """No step will follow; other ranks, if there are any, are told so."""
        self._ahead.land()
        self._ahead.drop()

    # The cache and the pools

    def reset_prefix_cache(self) -> None:
        """Nothing cached before is matched after."""
        self.scheduler.reset_prefix_cache()

    def weights_changed(self) -> None:
        """The same, and keys made from now on are of other weights; the device is at rest then."""
        self._ahead.land()
        self.scheduler.weights_changed()

    def suspend(self) -> None:
        """The pools are about to be freed: everybody waits, and what is under way is computed anew."""
        self._ahead.land()
        self._ahead.drop()
        self.scheduler.suspend()

    def resume(self) -> None:
        """The pools are back; who waits is admitted by the next step."""

    def hottest(self, count: int) -> list[CachedPrefix]:
        """The cached prefixes that most requests resumed from, the hottest first."""
        return self.scheduler.cache.hottest(count)

    # What there is

    @property
    def is_caching(self) -> bool:
        """Whether anything is cached."""
        return self.scheduler.cache.is_enabled

    @property
    def counters(self) -> Counters:
        """What has happened."""
        return self.scheduler.counters

    @property
    def ended_count(self) -> int:
        """Requests that have been reported as ended."""
        return self.output.reported_count

    def statistics(self) -> EngineStatistics:
        """What there is, and what has happened."""
        return EngineStatistics.of(self.scheduler, ended=self.ended_count, steps=self.step_count)

    def check(self) -> None:
        """Assert every invariant of requests and pools."""
        self.scheduler.check()
        known = {id(request) for request in self.output.requests()}
        assert {id(request) for request in [*self.scheduler.queues, *self.output.ended]} == known, "lost requests"
