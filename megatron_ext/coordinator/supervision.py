"""Supervision of tasks that must not end: one that fails is logged, counted, and started again."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine

logger = logging.getLogger(__name__)

PAUSE = 1.0  # seconds before a failed task is started again


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
