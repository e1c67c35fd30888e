"""Error isolation: errors that end only the request or task that they concern are counted and logged once."""

from __future__ import annotations

import contextlib
import logging
import sys
import traceback
from collections.abc import Iterator

from megatron_ext.errors import CheckpointError

logger = logging.getLogger(__name__)


class ErrorIsolation:
    """Counter and log of errors outside of the steps themselves.

    Args:
        owner: Component that continues in spite of the error, for the log.
    """

    def __init__(self, owner: str) -> None:
        self.count = 0
        self._owner = owner
        self._logged: set[tuple[str, type[BaseException]]] = set()

    def note(self, task: str, error: BaseException, *, once: bool = False) -> None:
        """Count an error and log it.

        Args:
            task: Name of the failed task.
            error: Error with its traceback.
            once: Log only the first error of this class for the same `task`.
        """
        self.count += 1
        if once:  # of few tasks, so that the set stays small; other tasks name a request
            key = task, type(error)
            if key in self._logged:
                return
            self._logged.add(key)
        try:
            if isinstance(error, CheckpointError):  # a fault in an external file: our traceback explains nothing
                logger.error("%s failed; %s continues: %s", task, self._owner, error)
            else:
                logger.error("%s failed; %s continues", task, self._owner, exc_info=error)
        except Exception:  # logging itself is broken
            with contextlib.suppress(OSError, ValueError):  # standard error may be closed, too
                traceback.print_exception(error, file=sys.stderr)

    @contextlib.contextmanager
    def guard(self, task: str) -> Iterator[None]:
        """Catch an error, which ends the block only; each `task` and class of error is logged once."""
        try:
            yield
        except Exception as error:
            self.note(task, error, once=True)
