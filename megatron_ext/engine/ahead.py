"""One step more than the one that is waited for: launched before its tokens are known (CU-6)."""

from __future__ import annotations

import contextlib

from megatron_ext.engine.executor import Computing, Executor, Following
from megatron_ext.engine.flight import Flight
from megatron_ext.scheduling.foresight import plan_of
from megatron_ext.scheduling.scheduler import Scheduler
from megatron_ext.scheduling.step import describe_ahead


class Ahead:
    """At most one launched step beyond the one whose tokens are read next.

    While it is under way nothing is planned: the next step is this one. What happens to its requests meanwhile makes
    rows void (see `Flight`), and leaves the order of launches as it was: whatever is written to blocks and slots that a
    void row still writes is launched later, so it comes later.

    Args:
        scheduler: Foresees steps.
        executor: Launches them, if it can before the tokens of others are known.
        is_on: Whether nothing but a request's last token is needed for its next step; drafters need the token.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor, *, is_on: bool) -> None:
        self._scheduler = scheduler
        self._executor = executor if is_on and isinstance(executor, Following) else None
        self._flight: Flight | None = None
        self._unread: Computing | None = None  # of a step that was dropped, and may still be computed

    def take(self) -> Flight | None:
        """The step that is under way, which is the next one; None if there is none, or nobody is left in it."""
        self.forget_void()
        flight, self._flight = self._flight, None
        if flight is None:
            return None
        named = self._scheduler.foresight.adopt()
        assert self._executor is not None, "it has launched a step ahead"
        self._executor.name_states(named)
        return flight.living()

    def launch_behind(self, flight: Flight) -> None:
        """Launch the step behind this one, if it is certain enough. If that raises, nothing of the two counts."""
        executor = self._executor
        if executor is None or not executor.can_follow:
            return
        foresight = self._scheduler.foresight
        chunks = foresight.foresee(flight.chunks)
        if not chunks:
            return
        step = describe_ahead(chunks, self._scheduler.limits.block_size, foresight.states)
        computing = executor.launch_behind(step)
        if computing is None:
            foresight.forgo()
        else:
            self._flight, self._unread = Flight(plan_of(chunks), step, computing), None  # computed before this one

    def land(self) -> None:
        """Wait until the device is at rest; what comes of the step is taken by the next call of the engine's step."""
        if self._unread is not None:
            with contextlib.suppress(Exception):  # nobody wants what comes of it
                self._unread.result()
            self._unread = None
        if self._flight is not None:
            self._flight = self._flight.landed()

    def drop(self, failed: Flight | None = None) -> None:
        """Nothing of the step counts: its requests have ended, or compute anew what it computed.

        Args:
            failed: The step before it, of which nothing counts, either; it may still be computed.
        """
        self._scheduler.foresight.forgo()
        last = self._flight or failed
        self._flight = None
        if last is not None:
            self._unread = last.computing

    def forget_void(self) -> None:
        """Keep nothing of requests that have ended, if all have."""
        if self._flight is not None and self._flight.living() is None:
            self.drop()
