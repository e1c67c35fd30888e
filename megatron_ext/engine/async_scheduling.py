"""One step more than the one that is waited for: launched before its tokens are known (CU-6)."""

from __future__ import annotations

import contextlib

from megatron_ext.engine.executor import AsyncExecutor, Computing, Executor
from megatron_ext.engine.in_flight_step import InFlightStep
from megatron_ext.scheduling.async_planning import plan_of
from megatron_ext.scheduling.scheduler import Scheduler
from megatron_ext.scheduling.step import describe_ahead


class AsyncScheduling:
    """At most one launched step beyond the one whose tokens are read next.

    While it is under way nothing is planned: the next step is this one. What happens to its requests meanwhile makes
    rows discarded (see `InFlightStep`), and leaves the order of launches as it was: whatever is written to blocks and
    slots that a discarded row still writes is launched later, so it comes later.

    Args:
        scheduler: Foresees steps.
        executor: Launches them, if it can before the tokens of others are known.
        is_on: Whether nothing but a request's last token is needed for its next step; drafters need the token.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor, *, is_on: bool) -> None:
        self._scheduler = scheduler
        self._executor = executor if is_on and isinstance(executor, AsyncExecutor) else None
        self._in_flight: InFlightStep | None = None
        self._unread: Computing | None = None  # of a step that was dropped, and may still be computed

    def take(self) -> InFlightStep | None:
        """The step that is under way, which is the next one; None if there is none, or nobody is left in it."""
        self.forget_discarded()
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is None:
            return None
        named = self._scheduler.async_planner.adopt()
        assert self._executor is not None, "it has launched a step ahead"
        self._executor.name_states(named)
        return in_flight.living()

    def launch_next(self, in_flight: InFlightStep) -> None:
        """Launch the step behind this one, if it is certain enough. If that raises, nothing of the two counts."""
        executor = self._executor
        if executor is None or not executor.can_launch_next:
            return
        async_planner = self._scheduler.async_planner
        chunks = async_planner.plan_next(in_flight.chunks)
        if not chunks:
            return
        step = describe_ahead(chunks, self._scheduler.limits.block_size, async_planner.states)
        computing = executor.launch_next(step)
        if computing is None:
            async_planner.forgo()
        else:
            self._in_flight, self._unread = (
                InFlightStep(plan_of(chunks), step, computing),
                None,
            )  # computed before this one

    def land(self) -> None:
        """Wait until the device is at rest; what comes of the step is taken by the next call of the engine's step."""
        if self._unread is not None:
            with contextlib.suppress(Exception):  # nobody wants what comes of it
                self._unread.result()
            self._unread = None
        if self._in_flight is not None:
            self._in_flight = self._in_flight.landed()

    def drop(self, failed: InFlightStep | None = None) -> None:
        """Nothing of the step counts: its requests have ended, or compute anew what it computed.

        Args:
            failed: The step before it, of which nothing counts, either; it may still be computed.
        """
        self._scheduler.async_planner.forgo()
        last = self._in_flight or failed
        self._in_flight = None
        if last is not None:
            self._unread = last.computing

    def forget_discarded(self) -> None:
        """Keep nothing of requests that have ended, if all have."""
        if self._in_flight is not None and self._in_flight.living() is None:
            self.drop()
