"""The thread that makes every call of an engine, one after the other."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from megatron_ext.engine.engine import Engine
from megatron_ext.mcore.adapter import InferenceEngine

Result = TypeVar("Result")

FAILED_STEPS = 3  # in a row: then the requests are given up


@dataclass(eq=False)
class _Call:
    """Something that waits for the thread.

    Attributes:
        run: To be called between two steps.
        take_in: The same while a step is computed; None if it has to wait.
        future: Of what comes of it.
    """

    run: Callable[[], object]
    take_in: Callable[[], object] | None
    future: Future[Any]

    def answer(self, function: Callable[[], object]) -> None:
        """Call it, unless nobody waits for that any more."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(function())
        except BaseException as error:  # for whoever waits, as executors do it
            self.future.set_exception(error)


class EngineThread:
    """A step blocks, so it runs in a thread, and the engine is not made for two: every call runs in this one.

    Calls run in the order of submission. What arrives during a step runs when the step ends, before the next one is
    planned; but requests may be taken in while the device computes, if no other call came before them (CU-6).

    Args:
        engine: Without requests. Nobody else may call it from now on.
    """

    def __init__(self, engine: InferenceEngine) -> None:
        device = next(engine.controller.inference_wrapped_model.model.parameters()).device
        self._loop = asyncio.new_event_loop()  # the thread's own; another engine steps on another one
        engine.use_loop(self._loop)
        self._calls = ThreadPoolExecutor(1, "engine", _use_device, (device,))
        self._waiting: deque[_Call] = deque()
        self._submitting = threading.Lock()
        if isinstance(engine.engine, Engine):
            engine.engine.while_computing = self.take_in

    def submit(self, function: Callable[..., Result], *arguments: object) -> Future[Result]:
        """Call a function in the thread, behind the calls before.

        Raises:
            RuntimeError: The thread is closed, or the interpreter ends.
        """
        return self._submit(_Call(partial(function, *arguments), None, Future()))

    def submit_requests(
        self, add: Callable[..., Result], arguments: tuple[object, ...], between_steps: Callable[..., Result]
    ) -> Future[Result]:
        """Let `between_steps(add, arguments)` be called like anything else, or `add(*arguments)` during a step.

        Args:
            add: Gives the engine requests, and does nothing else to it.
            arguments: Its own.
            between_steps: What else is to be done where no step is under way.

        Raises:
            RuntimeError: The thread is closed, or the interpreter ends.
        """
        return self._submit(_Call(partial(between_steps, add, arguments), partial(add, *arguments), Future()))

    def _submit(self, call: _Call) -> Future[Any]:
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
            call = self._waiting.popleft() if self._waiting else None  # it may have been taken in
        if call is not None:
            call.answer(call.run)

    def take_in(self) -> None:
        """In the thread, while a step is computed: requests that wait, up to the first call of another kind."""
        while True:
            with self._submitting:
                is_next = bool(self._waiting) and self._waiting[0].take_in is not None
                call = self._waiting.popleft() if is_next else None
            if call is None:
                return
            assert call.take_in is not None, "just seen"
            call.answer(call.take_in)

    def close(self) -> None:
        """Wait for the calls that have been submitted; the thread ends."""
        self._calls.submit(self._close_loop)
        self._calls.shutdown()

    def _close_loop(self) -> None:
        """In the thread, since its caller may run a loop of its own."""
        self._loop.run_until_complete(_settle())
        self._loop.close()


async def _settle() -> None:
    """Let the engine's own notifications run out."""
    for _ in range(2):
        await asyncio.sleep(0)


def _use_device(device: torch.device) -> None:
    """The current device belongs to a thread."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
