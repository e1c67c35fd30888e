"""Event loop in a thread of its own, for coroutines of callers without one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import TypeVar

import torch

from megatron_ext.errors import EngineClosed
from megatron_ext.mcore import platform

Result = TypeVar("Result")


class BackgroundLoop:
    """Event loop that the first coroutine starts; all methods may be called from any thread."""

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, args=(platform.device(),), name="coroutines", daemon=True)
        self._is_closed = False

    def submit(self, coroutine: Coroutine[object, object, Result]) -> Future[Result]:
        """Schedule a coroutine.

        Raises:
            EngineClosed: The loop is closed.
        """
        with self._changing:
            if self._is_closed:
                coroutine.close()
                raise EngineClosed("the engine has been shut down; make a new one")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread.start()
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run_sync(self, coroutine: Coroutine[object, object, Result]) -> Result:
        """Schedule a coroutine, and wait for its result.

        Raises:
            EngineClosed: The loop is closed.
            RuntimeError: Called by a coroutine of this loop, which could never go on.
        """
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError("run_sync() in a coroutine of its own loop would wait forever; await it instead")
        return self.submit(coroutine).result()

    def close(self) -> None:
        """Cancel all coroutines, and end the thread; does nothing if that was done."""
        with self._changing:
            self._is_closed = True
            if self._loop is None:
                return
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self, device: torch.device) -> None:
        loop = self._loop
        assert loop is not None, "set before the start"
        if device.type == "cuda":  # otherwise a thread has the first one
            torch.cuda.set_device(device)
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
        finally:
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            loop.close()
