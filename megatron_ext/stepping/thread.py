"""The thread that makes every call of an engine, one after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

from megatron_ext.mcore.adapter import InferenceEngine

Result = TypeVar("Result")

FAILED_STEPS = 3  # in a row: then the requests are given up


class EngineThread:
    """A step blocks, so it runs in a thread, and the engine is not made for two: every call runs in this one.

    Calls run in the order of submission. What arrives during a step runs when the step ends, before the next one is
    planned.

    Args:
        engine: Without requests. Nobody else may call it from now on.
    """

    def __init__(self, engine: InferenceEngine) -> None:
        device = next(engine.controller.inference_wrapped_model.model.parameters()).device
        self._loop = asyncio.new_event_loop()  # the thread's own; another engine steps on another one
        engine.use_loop(self._loop)
        self._calls = ThreadPoolExecutor(1, "engine", _use_device, (device,))

    def submit(self, function: Callable[..., Result], *arguments: object) -> Future[Result]:
        """Call a function in the thread, behind the calls before.

        Raises:
            RuntimeError: The thread is closed, or the interpreter ends.
        """
        return self._calls.submit(function, *arguments)

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
