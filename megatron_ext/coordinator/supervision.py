"""Supervision of tasks that must not end: one that fails is logged, counted, and started again; and time-outs."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from typing import TypeVar

logger = logging.getLogger(__name__)

PAUSE = 1.0  # seconds before a failed task is started again
Result = TypeVar("Result")


async def within(seconds: float, work: Awaitable[Result]) -> Result:
    """Return the result of `work`, which is cancelled if it takes longer.

    If this call is cancelled, it ends as cancelled, even if the result arrives at the same moment. Before Python 3.12
    `asyncio.wait_for` returns the result then, and a task that is cancelled once goes on for ever.

    Args:
        seconds: Time limit.
        work: Awaitable, also cancelled with this call.

    Raises:
        asyncio.TimeoutError: There is no result in time.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait((task,), timeout=seconds)
        if task.done():
            return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))
        if not task.cancelled():
            task.exception()  # else it is logged as not retrieved
    raise asyncio.TimeoutError


class Supervisor:
    """Starts tasks and restarts those that fail. All methods run on one event loop.

    Attributes:
        restarts: Number of restarts, by kind of task.
    """

    def __init__(self) -> None:
        self.restarts: Counter[str] = Counter()

    def start(self, kind: str, subject: str, run: Callable[[], Coroutine[object, None, None]]) -> asyncio.Task[None]:
        """Run `run()` until it returns or is cancelled, again after each exception.

        Args:
            kind: Kind of the task, for the count.
            subject: Object of the task, such as a replica's URL, for the log.
            run: Function that returns a new coroutine of the task.
        """
        return asyncio.get_running_loop().create_task(self._keep_running(kind, subject, run))

    async def _keep_running(self, kind: str, subject: str, run: Callable[[], Coroutine[object, None, None]]) -> None:
        while True:
            try:
                await run()
            except Exception:
                self.restarts[kind] += 1
                logger.exception("the task %s of %s has failed; it is started again in %g s", kind, subject, PAUSE)
                await asyncio.sleep(PAUSE)
            else:
                return
