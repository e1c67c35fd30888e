"""Asynchronous scheduling: launch one more step before the tokens of the current one are known (CU-6).

A step is in flight from its launch to the commit of its result.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ext.engine.executor import Computed, Computing, Executor
from megatron_ext.engine.result import StepResult
from megatron_ext.scheduling.chunk import Chunk
from megatron_ext.scheduling.plan import StepPlan
from megatron_ext.scheduling.scheduler import Scheduler
from megatron_ext.scheduling.step import ScheduledStep, describe_step


@dataclass(frozen=True)
class InFlightStep:
    """Launched step whose result has not been committed.

    Requests can end while the step is in flight, if it was launched before the tokens of the step before were known:
    their rows are *discarded*, and so are the results. Rows are matched by request object and not by id, because
    another request may have the id by then.

    Attributes:
        plan: Plan of the step.
        step: Message that is computed.
        computing: Handle of the computation.
        weights_version: Version of the weights that it is computed with.
    """

    plan: StepPlan
    step: ScheduledStep
    computing: Computing
    weights_version: int

    @property
    def chunks(self) -> Sequence[Chunk]:
        """Chunks that the step computes, in the order of the message."""
        return self.plan.chunks

    def living(self) -> InFlightStep | None:
        """Return the step without discarded rows; None if no other rows are left."""
        alive = [not chunk.request.is_ended for chunk in self.chunks]
        if all(alive):
            return self
        if not any(alive):
            return None
        chunks = tuple(one for one, is_alive in zip(self.chunks, alive, strict=True) if is_alive)
        kept_chunks = tuple(one for one, is_alive in zip(self.step.chunks, alive, strict=True) if is_alive)
        step = ScheduledStep(kept_chunks, sum(alive[: self.step.num_decode]))
        return dataclasses.replace(self, plan=dataclasses.replace(self.plan, chunks=chunks), step=step)

    def synchronized(self) -> InFlightStep:
        """Return the step after its computation has succeeded or failed: `result` does not wait any more."""
        found: StepResult | Exception
        try:
            found = self.computing.result()
        except Exception as error:  # raised again by `result`
            found = error
        return dataclasses.replace(self, computing=Computed(found))

    def result(self) -> StepResult:
        """Wait for the results of its rows.

        If that raises, the step is void.
        """
        result = self.computing.result()
        names = {chunk.request_id for chunk in self.step.chunks}
        return result if result.tokens.keys() <= names else result.of(names)


class AsyncScheduling:
    """Launcher and holder of at most one step beyond the one whose tokens are read next.

    While that step is in flight nothing else is planned: it is the next step. Requests that end meanwhile make rows
    discarded (see `InFlightStep`) and do not change the order of launches: a discarded row still writes blocks and
    slots, and whatever is written there next is launched, and therefore written, later.

    Args:
        scheduler: Scheduler that plans steps ahead.
        executor: Executor of the steps.
        is_on: True if a request's next step needs nothing but its last token; drafters need the token's value.

    Attributes:
        discarding_count: Steps launched ahead of which rows were discarded, or all of them.
        weights_version: Version of the weights that steps are launched with.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor, *, is_on: bool) -> None:
        self._scheduler = scheduler
        self._executor = executor if is_on else None
        self._in_flight: InFlightStep | None = None
        self.discarding_count = 0
        self.weights_version = 0
        self._unread: Computing | None = None  # result of a dropped step that may still be computed

    def take(self) -> InFlightStep | None:
        """Return the step in flight, which is the next one; None if there is no such step or no living row in it."""
        self.forget_discarded()
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is None:
            return None
        named = self._scheduler.async_planner.adopt()
        assert self._executor is not None, "it has launched a step ahead"
        self._executor.name_states(named)
        living = in_flight.living()
        self.discarding_count += living is not in_flight
        return living

    def launch_next(self, in_flight: InFlightStep) -> None:
        """Launch the step after `in_flight` if it is certain enough. If that raises, both steps are void."""
        executor = self._executor
        if executor is None or not executor.can_launch_next:
            return
        async_planner = self._scheduler.async_planner
        plan = async_planner.plan_next(in_flight.chunks)
        if plan is None:
            return
        cache = self._scheduler.cache
        size, states = self._scheduler.limits.block_size, async_planner.states
        step = describe_step(plan.chunks, size, cache.changes, ahead=states)
        try:
            computing = executor.launch_next(step)
        except BaseException:
            cache.note_changes_sent()  # they may have been made
            raise
        if computing is None:
            async_planner.forgo()
        else:
            cache.note_changes_sent()
            self._in_flight = InFlightStep(plan, step, computing, self.weights_version)
            self._unread = None  # it is computed before this one

    def synchronize(self) -> None:
        """Wait until the device is idle; the next engine step takes the result."""
        if self._unread is not None:
            with contextlib.suppress(Exception):  # the result is not needed
                self._unread.result()
            self._unread = None
        if self._in_flight is not None:
            self._in_flight = self._in_flight.synchronized()

    def drop(self, failed: InFlightStep | None = None) -> None:
        """Drop the step in flight: its requests have ended, or recompute its tokens.

        Args:
            failed: The step before it, which is void, too, and may still be computed.
        """
        self._scheduler.async_planner.forgo()
        last = self._in_flight or failed
        self._in_flight = None
        if last is not None:
            self._unread = last.computing

    def forget_discarded(self) -> None:
        """Drop the step in flight if all its requests have ended."""
        if self._in_flight is not None and self._in_flight.living() is None:
            self.discarding_count += 1
            self.drop()
