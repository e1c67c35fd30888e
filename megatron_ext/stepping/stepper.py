"""Steps an engine in its own thread as long as there are requests; whoever waits for them may be in any thread."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

from megatron_ext.config import RequestParams
from megatron_ext.errors import EngineClosed, EngineSuspended, RankError
from megatron_ext.mcore.adapter import InferenceEngine
from megatron_ext.scheduling.record import RequestRecord
from megatron_ext.stepping.progress import Update, Updates
from megatron_ext.stepping.thread import FAILED_STEPS, EngineThread

Result = TypeVar("Result")


@dataclass(eq=False)
class PendingRequest:
    """A request on its way into the engine, in it, or out of it.

    Attributes:
        tokens: The prompt.
        params: What it asks for.
        text: The prompt, if it was a text.
        notify: Called by the engine's thread when there are new updates, and when it has ended; None: there are none.
        request_id: Once the engine has it.
        updates: What it got so far; taken out by whoever reads them. None after it has ended: the record says all.
        record: Of its end.
        is_abandoned: Nobody waits for it any more.
    """

    tokens: Sequence[int]
    params: RequestParams
    text: str | None
    notify: Callable[[], object] | None = None
    request_id: int | None = None
    updates: deque[Update] = field(default_factory=deque)
    record: Future[RequestRecord] = field(default_factory=Future)
    is_abandoned: bool = False


class Stepper:
    """Takes requests and calls from any thread, and steps as long as there is something to do or to report.

    A step that fails is tried again, with its requests; after several in a row all requests end as FAILED.

    Args:
        engine: Without requests. Nobody else may call it from now on.
    """

    def __init__(self, engine: InferenceEngine) -> None:
        self._engine = engine
        self._thread = EngineThread(engine)
        self._closing = threading.Lock()
        self._is_closed = False
        self._abandoned: deque[PendingRequest] = deque()
        self._closed = threading.Event()
        heartbeat = engine.engine.heartbeat
        if heartbeat is not None:
            threading.Thread(target=self._keep_in_touch, args=(heartbeat,), name="heartbeat", daemon=True).start()
        # From here on the engine's thread's own.
        self._ids = itertools.count()
        self._pending: dict[int, PendingRequest] = {}  # by id
        self._updates = Updates(engine.fail_request)
        self._has_turn = False  # a turn is under way or submitted
        self._failures = 0  # steps, in a row

    # Called by anybody

    def submit(self, requests: Sequence[PendingRequest]) -> Future[None]:
        """Hand requests to the engine, all or none.

        Returns:
            Done when it has them. Its errors: `EngineSuspended`, and `ConfigError` for a request that makes no sense.

        Raises:
            EngineClosed: The engine is closed.
        """
        with self._closing:
            self._check_open()
            return self._thread.submit_requests(self._add, (requests,), self._between_steps)

    def call(self, function: Callable[..., Result], *arguments: object) -> Result:
        """Call something with the engine's thread, between two steps, and wait for it.

        Raises:
            EngineClosed: The engine is closed.
        """
        return self._submit(function, *arguments).result()

    def abort(self, requests: Iterable[PendingRequest]) -> None:
        """Free whatever these requests own before anything else is computed or asked; returns at once.

        It takes no lock, so that the garbage collector may call it at any moment in any thread.
        """
        for request in requests:
            request.is_abandoned = True
            self._abandoned.append(request)

    def close(self) -> bool:
        """End all requests with `EngineClosed`, wait for the step in flight, and end the thread.

        Returns:
            Whether this call did so; another one had done it before.
        """
        with self._closing:
            if self._is_closed:
                return False
            ended = self._thread.submit(self._end_all)
            self._is_closed = True
        self._closed.set()
        try:
            ended.result()
        finally:
            self._thread.close()
        return True

    def _keep_in_touch(self, seconds: float) -> None:
        """Other ranks wait for this one, and give it up after a while."""
        while not self._closed.wait(seconds / 2):
            with contextlib.suppress(EngineClosed):
                self._submit(self._say_that_it_lives)

    def _submit(self, function: Callable[..., Result], *arguments: object) -> Future[Result]:
        with self._closing:
            self._check_open()
            return self._thread.submit(self._between_steps, function, arguments)

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineClosed("the engine is closed; load another one")

    # Called by the engine's thread

    def _between_steps(self, function: Callable[..., Result], arguments: tuple[object, ...]) -> Result:
        self._drop_abandoned()
        try:
            return function(*arguments)
        finally:
            self._go_on()

    def _add(self, requests: Sequence[PendingRequest]) -> None:
        if self._engine.is_suspended:
            raise EngineSuspended("the engine is suspended; call resume() before anything is generated")
        added: dict[int, PendingRequest] = {}
        try:
            for request in requests:
                name = next(self._ids)
                self._engine.add_request(name, request.tokens, request.params, prompt_text=request.text)
                request.request_id = name
                added[name] = request
        except Exception:
            for name in added:
                self._engine.abort_request(name)
            raise
        self._failures = 0
        self._pending |= added
        self._updates.watch(name for name, request in added.items() if request.notify)
        self._abort(request for request in requests if request.is_abandoned)

    def _drop_abandoned(self) -> None:
        while self._abandoned:
            self._abort([self._abandoned.popleft()])

    def _abort(self, requests: Iterable[PendingRequest]) -> None:
        for request in requests:
            if request.request_id in self._pending:
                self._engine.abort_request(request.request_id)

    def _end_all(self) -> None:
        self._abort(list(self._pending.values()))
        self._give_up(EngineClosed("the engine was closed before this request had ended"))
        with contextlib.suppress(RankError):  # other ranks that are lost need not be told
            self._engine.close()

    def _say_that_it_lives(self) -> None:
        try:
            self._engine.idle()
        except RankError as error:
            self._note_failed_step(error)

    def _go_on(self) -> None:
        """See to it that a turn comes if there is something to do or to report."""
        is_stuck = self._failures > FAILED_STEPS
        if self._has_turn or self._engine.is_suspended or is_stuck or not self._engine.has_unfinished_requests():
            return
        with contextlib.suppress(RuntimeError):  # the engine is being closed, or the interpreter ends
            self._thread.submit(self._turn)
            self._has_turn = True

    def _turn(self) -> None:
        """One step, what came of it, and the next turn behind the calls that have been submitted meanwhile."""
        self._has_turn = False
        self._drop_abandoned()
        if self._is_closed or self._engine.is_suspended or not self._engine.has_unfinished_requests():
            return
        try:
            report = self._engine.step_modern()
        except Exception as error:
            self._note_failed_step(error)
        else:
            self._failures = 0
            self._deliver(report["active_request_ids"], report["finished_request_records"])
        self._go_on()

    def _deliver(self, active: Sequence[int], records: Sequence[RequestRecord]) -> None:
        self._updates.forget(record.request_id for record in records)
        living = [self._engine.get_request(name) for name in active]
        for name, update in self._updates.of(living).items():
            self._pending[name].updates.append(update)
            self._notify(self._pending[name])
        for record in records:
            request = self._pending.pop(record.request_id, None)
            if request is not None:
                _end(request, record)
                self._notify(request)

    def _notify(self, request: PendingRequest) -> None:
        """Tell whoever reads; if nobody can be told any more, nobody waits for it either."""
        if request.notify is None:
            return
        try:
            request.notify()
        except Exception as error:
            self._engine.faults.note(f"the reader of request {request.request_id}", error)
            self._abort([request])

    def _note_failed_step(self, error: Exception) -> None:
        """Its requests wait for the next one; after several in a row all end, which one more step reports.

        What several ranks cannot do together is not tried again.
        """
        self._failures = FAILED_STEPS + 1 if isinstance(error, RankError) else self._failures + 1
        self._engine.faults.note(f"an engine step, {self._failures} in a row,", error)
        if self._failures == FAILED_STEPS:
            for name in self._pending:
                self._engine.fail_request(name, error)
        elif self._failures > FAILED_STEPS:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """All requests end with this error, and no record."""
        requests = list(self._pending.values())
        self._pending.clear()
        for request in requests:
            _end(request, error)
            self._notify(request)


def _end(request: PendingRequest, outcome: RequestRecord | Exception) -> None:
    """Whoever waits for the record gets it, or the error in its place; nobody does if the wait was cancelled."""
    if not request.record.set_running_or_notify_cancel():
        return
    if isinstance(outcome, Exception):
        request.record.set_exception(outcome)
    else:
        request.record.set_result(outcome)
