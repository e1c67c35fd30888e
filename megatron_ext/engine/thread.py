"""Thread of the engine, which makes every call of an engine core in order."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, TypeVar

from megatron_ext.engine.core import EngineCore

Result = TypeVar("Result")
WAKE_SECONDS = 0.2


def result_of(future: Future[Result]) -> Result:
    """Return the result of a future, for the main thread, which handles signals while it waits.

    A signal that arrives just before a thread begins to wait, or in another thread, does not end the wait by itself.
    """
    while not future.done():
        wait([future], WAKE_SECONDS)
    return future.result()


def complete(future: Future[Result], function: Callable[..., Result], *arguments: object) -> None:
    """Call a function, and set the future to its result or error, unless the future was cancelled."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function(*arguments))
    except BaseException as error:  # passed to the waiting thread, as executors do
        future.set_exception(error)


@dataclass(eq=False)
class _Call:
    """Call in the queue of the thread.

    Attributes:
        run: Function to call between two steps.
        take_in: Function to call while a step is computed; None if the call has to wait for the end of the step.
        future: Result or error of the call.
    """

    run: Callable[[], object]
    take_in: Callable[[], object] | None
    future: Future[Any]


class EngineThread:
    """Thread that runs calls in the order of submission.

    Calls that arrive during a step run when it ends, before the next one is planned; but requests may be added while
    the device computes, if no other call came before them (CU-6). With several ranks they wait for the end of the step,
    since every rank must add them at the same point.

    Args:
        core: Engine core without requests. No other thread may call it from now on.
    """

    def __init__(self, core: EngineCore) -> None:
        self._calls = ThreadPoolExecutor(1, "engine", core.resources.bind_thread)
        self._waiting: deque[_Call] = deque()
        self._submitting = threading.Lock()
        if core.workers.heartbeat is None:
            core.host_work = self.take_in

    def submit(self, run: Callable[[], Result], take_in: Callable[[], Result] | None = None) -> Future[Result]:
        """Call a function in the thread, after the calls submitted before.

        Args:
            run: Function to call between two steps.
            take_in: Function that may be called in its place while a step is computed: it adds requests to the engine,
                and does nothing else to it.

        Raises:
            RuntimeError: The thread is closed, or the interpreter ends.
        """
        call = _Call(run, take_in, Future())
        with self._submitting:
            self._waiting.append(call)
            try:
                self._calls.submit(self._run_next)
            except RuntimeError:
                self._waiting.pop()
                raise
        return call.future

    def _run_next(self) -> None:
        with self._submitting:
            call = self._waiting.popleft() if self._waiting else None  # the call may have been taken in already
        if call is not None:
            complete(call.future, call.run)

    def take_in(self) -> None:
        """Run waiting calls that add requests while a step is computed, up to the first call of another kind."""
        while True:
            with self._submitting:
                is_next = bool(self._waiting) and self._waiting[0].take_in is not None
                call = self._waiting.popleft() if is_next else None
            if call is None:
                return
            assert call.take_in is not None, "just seen"
            complete(call.future, call.take_in)

    def close(self) -> None:
        """Wait for all submitted calls, and end the thread."""
        self._calls.shutdown()
