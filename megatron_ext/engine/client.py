"""Engine client: one thread that steps an engine core, for callers in any thread.

The client owns the thread, the heartbeat to other ranks, retries of failed steps, giving up, and delivery. Its callers
are the server, the Python interface and offline runs.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from megatron_ext.engine.client_request import EngineRequest
from megatron_ext.engine.core import EngineCore
from megatron_ext.engine.pausing import ABORT, Pause, PauseMode
from megatron_ext.engine.result import EngineStep, StepOutput
from megatron_ext.engine.thread import EngineThread, complete, result_of
from megatron_ext.errors import EngineClosed, EngineSuspended, RankError
from megatron_ext.scheduling.request import Request

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
FAILED_STEPS = 3  # in a row, before the requests are given up


class ClientListener:
    """Observer of an engine client; every method is called by the engine's thread. By default it does nothing."""

    def on_step(self, output: StepOutput) -> None:
        """Handle the output of a step, before it is delivered."""

    def on_delivery(self, requests: Sequence[EngineRequest]) -> None:
        """Handle requests that have new updates or have ended."""

    def on_call(self) -> None:
        """Handle the end of a call between two steps, or of a failed step."""

    def on_failed_step(self, error: Exception) -> None:
        """Handle a failed step; its requests are retried or given up."""

    def on_lost_ranks(self, error: RankError) -> None:
        """Handle the loss of other ranks, after which nothing can be computed."""


class EngineClient:
    """Client of an engine core: accepts requests and calls from any thread, and steps while the core is busy.

    A failed step is retried with its requests; after `FAILED_STEPS` failures in a row all requests end as FAILED.
    Submissions and calls to a closed client raise `EngineClosed`.

    Args:
        core: Engine core without requests. No other thread may call it from now on.
        steps_itself: True if the client steps as long as there are requests. Otherwise `step` takes each step and
            raises its errors.

    Attributes:
        pausing: Current pause; None while the client steps.
    """

    def __init__(self, core: EngineCore, *, steps_itself: bool = True) -> None:
        self._core, self._steps_itself = core, steps_itself
        self._listener = ClientListener()
        self._thread = EngineThread(core)
        self._closing = threading.Lock()
        self._closed = threading.Event()
        self._abandoned: deque[EngineRequest] = deque()
        # All fields below belong to the engine's thread.
        self._idle_calls: deque[Callable[[], None]] = deque()  # wait for the end of the requests before them
        self._held: list[tuple[Future[None], Callable[[], None]]] = []  # additions that wait for these calls
        self._ids = itertools.count()
        self._pending: dict[int, EngineRequest] = {}  # by request id
        self._is_step_submitted = False
        self._failures = 0  # failed steps in a row
        self.pausing: Pause | None = None
        if core.workers.heartbeat is not None:
            beat = threading.Thread(target=self._beat, args=(core.workers.heartbeat,), name="heartbeat", daemon=True)
            beat.start()

    # Methods for any thread

    def submit(self, requests: Sequence[EngineRequest]) -> Future[None]:
        """Submit requests to the engine, all or none.

        Returns:
            Future that is done when the engine has the requests. Its errors: `EngineSuspended`, `SilentWeightChange`,
            and `ConfigError` for an invalid request.
        """
        with self._closing:
            self._check_open()
            added, add = Future[None](), partial(self._add, requests)
            self._thread.submit(
                partial(self._add_or_hold, added, add, partial(self._between_steps, add)),
                take_in=partial(self._add_or_hold, added, add, add),
            )
            return added

    def call(self, function: Callable[..., Result], *arguments: object) -> Future[Result]:
        """Call a function in the engine's thread, between two steps."""
        with self._closing:
            self._check_open()
            return self._thread.submit(partial(self._between_steps, function, *arguments))

    def call_when_idle(self, function: Callable[..., Result], *arguments: object) -> Future[Result]:
        """Call a function in the engine's thread once the requests submitted before have ended.

        Requests submitted meanwhile wait for the call. A paused or suspended engine takes no steps, so that the call
        waits until it continues.
        """
        with self._closing:
            self._check_open()
            called: Future[Result] = Future()
            call = partial(complete, called, self._unless_closed, function, *arguments)
            self._thread.submit(partial(self._between_steps, self._idle_calls.append, call))
            return called

    @property
    def is_busy(self) -> bool:
        """True if a step would compute or report anything."""
        return self._core.is_busy

    def pause(self, max_seconds: float | None = None, mode: PauseMode = "keep") -> int:
        """Stop stepping and wait until the device is idle; new requests queue up. Replaces a pause before it.

        Returns:
            Number of requests that ended: all with the mode "abort", none with "keep"; see `PauseMode`.

        Raises:
            ConfigError: `max_seconds` or `mode` is invalid; see `Pause`.
        """
        return self.call(self._pause, Pause(max_seconds, mode)).result()

    def unpause(self) -> None:
        """Continue to step, and wait for the engine's thread to know that; does nothing without a pause."""
        self.call(self._unpause).result()

    def listen(self, listener: ClientListener | None) -> None:
        """Replace the listener, between two steps; None for one that does nothing."""
        self.call(self._listen, listener or ClientListener()).result()

    def step(self) -> StepOutput:
        """Take one step and wait for it, if the client does not step by itself; raises the errors of the core."""
        assert not self._steps_itself, "steps follow each other by themselves"
        return self.call(self._step).result()

    def abort(self, requests: Iterable[EngineRequest], *, at_once: bool = False) -> None:
        """Abandon requests: the engine's thread ends them and frees their memory before its next step or call.

        By default this neither waits nor takes a lock, so that the garbage collector may call it at any moment in any
        thread; a suspended engine frees the memory with its next call.

        Args:
            requests: Requests to end.
            at_once: Whether to submit a call as well, so that a suspended engine frees the memory, too.
        """
        for request in requests:
            request.is_abandoned = True
            self._abandoned.append(request)
        if at_once and self._abandoned:
            with contextlib.suppress(EngineClosed):
                self.call(lambda: None)  # the call itself ends abandoned requests

    def close(self) -> bool:
        """End all requests with `EngineClosed`, wait for the step in flight, and end the thread.

        Returns:
            True if this call closed the client; False if it was closed before.
        """
        with self._closing:
            if self._closed.is_set():
                return False
            self._closed.set()  # first, so that no call that waits is made by the end itself
            ended = self._thread.submit(self._end_all)
        try:
            result_of(ended)
        finally:
            self._thread.close()
        return True

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise EngineClosed("the engine is closed; load a new one")

    def _beat(self, seconds: float) -> None:
        """Send heartbeats to other ranks, which give this rank up after a while without any."""
        while not self._closed.wait(seconds / 2):
            with contextlib.suppress(EngineClosed):
                self.call(self._idle)

    # Methods of the engine's thread

    def _between_steps(self, function: Callable[..., Result], *arguments: object) -> Result:
        """Run a call; afterwards report the requests that it has ended, and go on with steps."""
        self._drop_abandoned()
        try:
            return function(*arguments)
        finally:
            self._listener.on_call()
            if self.pausing is not None or self._core.is_suspended:
                self._report_ended()
            self._submit_step()

    def _unless_closed(self, function: Callable[..., Result], *arguments: object) -> Result:
        self._check_open()
        return function(*arguments)

    def _add_or_hold(self, added: Future[None], add: Callable[[], None], run: Callable[[], None]) -> None:
        """Add requests by `run`, or hold `add` back while calls wait for the end of the requests before."""
        if self._idle_calls:
            self._held.append((added, add))
        else:
            complete(added, run)

    def _make_idle_calls(self) -> None:
        """Once no request is pending, make the calls that wait for that, then add the requests held back."""
        if self._pending or not self._idle_calls:
            return
        while self._idle_calls:
            self._idle_calls.popleft()()
        held, self._held = self._held, []
        for added, add in held:
            complete(added, self._unless_closed, add)

    def _add(self, requests: Sequence[EngineRequest]) -> None:
        if self._core.is_suspended:
            raise EngineSuspended("the engine is suspended; call resume() before anything is generated")
        self._core.check_weights()
        added: list[EngineRequest] = []
        groups: dict[tuple[tuple[int, ...], str | None], int] = {}
        try:
            for one in requests:
                name, prompt = next(self._ids), (one.inputs.prompt_tokens, one.inputs.params.cache_salt)
                group = groups.setdefault(prompt, name) if len(requests) > 1 else None
                one.request = self._core.add(name, one.inputs, group=group)
                added.append(one)
        except Exception:
            self._abort(added)
            raise
        self._failures = 0
        self._pending |= {one.request.request_id: one for one in added if one.request is not None}
        self._abort(one for one in added if one.is_abandoned)

    def _drop_abandoned(self) -> None:
        while self._abandoned:
            self._abort([self._abandoned.popleft()])

    def _abort(self, requests: Iterable[EngineRequest]) -> None:
        for one in requests:
            if one.request is None:
                continue
            try:
                self._core.output.abort(one.request)
            except Exception as error:
                self._core.error_isolation.note(f"the end of request {one.request.request_id}", error)

    def _end_all(self) -> None:
        self._unpause()
        self._abort(list(self._pending.values()))
        self._give_up(EngineClosed("the engine was closed before this request had ended"))
        try:
            self._core.close()
        except RankError as error:
            self._listener.on_lost_ranks(error)
        finally:  # another error is the caller's; no future that waits may be left without an end
            self._make_idle_calls()

    def _idle(self) -> None:
        try:
            self._core.workers.idle()
        except RankError as error:
            self._note_failed_step(error)

    def _pause(self, pause: Pause) -> int:
        self._unpause()
        self.pausing = pause
        pause.start(partial(self.call, self._time_out, pause))
        self._core.synchronize()
        if pause.mode == "keep":
            return 0
        return sum(
            [self._core.output.abort(one.request, ABORT) for one in self._pending.values() if one.request is not None]
        )

    def _unpause(self) -> None:
        if self.pausing is not None:
            self.pausing.cancel()
            self.pausing = None

    def _time_out(self, pause: Pause) -> None:
        if self.pausing is pause:  # no other one has replaced it
            logger.warning("generation resumes by itself: it was paused for %g s at most", pause.max_seconds)
            self._unpause()

    def _report_ended(self) -> None:
        """Deliver the records of requests that have ended while no step is taken."""
        records = self._core.report(EngineStep())
        if records:
            self._deliver(StepOutput((), records, 0.0))

    def _listen(self, listener: ClientListener) -> None:
        self._listener = listener

    def _submit_step(self) -> None:
        """Submit the next step if there is something to compute or to report."""
        self._make_idle_calls()
        is_stuck = self._failures > FAILED_STEPS or not self._steps_itself or self.pausing is not None
        if self._is_step_submitted or is_stuck or self._core.is_suspended or not self._core.is_busy:
            return
        with contextlib.suppress(RuntimeError):  # the client is being closed, or the interpreter ends
            self._thread.submit(self._run_step)
            self._is_step_submitted = True

    def _run_step(self) -> None:
        """Take one step, deliver its output, and submit the next step after the calls submitted meanwhile."""
        self._is_step_submitted = False
        self._drop_abandoned()
        if self._closed.is_set() or self.pausing is not None or self._core.is_suspended or not self._core.is_busy:
            return
        try:
            self._step()
        except Exception as error:
            self._note_failed_step(error)
            self._listener.on_call()
        self._submit_step()

    def _step(self) -> StepOutput:
        output = self._core.step()
        self._failures = 0
        self._deliver(output)
        return output

    def _deliver(self, output: StepOutput) -> None:
        with self._core.error_isolation.guard("the observer of a step"):
            self._listener.on_step(output)
        changed = [self._pending[request.request_id] for request in output.active if self._has_update(request)]
        for record in output.records:
            one = self._pending.pop(record.request_id, None)
            if one is not None:
                one.end(record)
                changed.append(one)
        self._notify(changed)

    def _has_update(self, request: Request) -> bool:
        """Collect the new output of a running request; return whether there is any. An error ends that request only."""
        try:
            return request.request_id in self._pending and self._pending[request.request_id].collect()
        except Exception as error:
            self._core.output.fail(request, error)
            return False

    def _notify(self, changed: Sequence[EngineRequest]) -> None:
        """Notify the readers; a request whose reader cannot be notified is aborted."""
        for one in changed:
            if one.notify is None:
                continue
            try:
                one.notify()
            except Exception as error:
                self._core.error_isolation.note(
                    f"the reader of request {one.request and one.request.request_id}", error
                )
                self._abort([one])
        if changed:
            with self._core.error_isolation.guard("a delivery"):
                self._listener.on_delivery(changed)

    def _note_failed_step(self, error: Exception) -> None:
        """Count a failed step: its requests are retried; after several failures in a row all requests end.

        A `RankError` is not retried.
        """
        is_lost = isinstance(error, RankError)
        self._failures = FAILED_STEPS + 1 if is_lost else self._failures + 1
        self._core.error_isolation.note(f"an engine step, {self._failures} in a row,", error)
        with self._core.error_isolation.guard("the observer of a failed step"):
            self._listener.on_failed_step(error)
            if isinstance(error, RankError):
                self._listener.on_lost_ranks(error)
        if self._failures == FAILED_STEPS:  # one more step reports them
            for one in self._pending.values():
                assert one.request is not None, "the engine has it"
                one.step_error = error
                self._core.output.fail(one.request, error, is_noted=True)
        elif self._failures > FAILED_STEPS:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """End all requests with `error`; their partial records have the tokens generated so far."""
        ended = list(self._pending.values())
        self._pending.clear()
        for one in ended:
            if one.request is not None:
                one.partial = self._core.output.give_up(one.request, error)
            one.end(error)
        self._notify(ended)
