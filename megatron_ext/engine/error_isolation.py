"""Errors that must stop nobody but whom they concern: counted, logged once, and put into words."""

from __future__ import annotations

import contextlib
import logging
import sys
import traceback
from collections.abc import Iterator

from megatron_ext.errors import CheckpointError

logger = logging.getLogger(__name__)

_MAX_CHARACTERS = 500


def describe(error: BaseException) -> str:
    """An error's class and words in one line, for records and events; bounded, and no error itself."""
    try:
        words = " ".join(str(error).split())
    except Exception:  # its own class cannot say it
        words = ""
    name = type(error).__name__
    return f"{name}: {words[:_MAX_CHARACTERS]}" if words else name


class ErrorIsolation:
    """What went wrong beside the steps themselves.

    Args:
        owner: Who goes on in spite of it, for the log.
    """

    def __init__(self, owner: str) -> None:
        self.count = 0
        self._owner = owner
        self._logged: set[tuple[str, type[BaseException]]] = set()

    def note(self, what: str, error: BaseException, *, once: bool = False) -> None:
        """Count an error and log it.

        Args:
            what: What has failed.
            error: With its traceback.
            once: Log it the first time only that `what` fails with an error of this class.
        """
        self.count += 1
        key = what, type(error)
        if once and key in self._logged:
            return
        self._logged.add(key)
        try:
            if isinstance(error, CheckpointError):  # a file of others: our traceback explains nothing
                logger.error("%s failed; %s goes on: %s", what, self._owner, error)
            else:
                logger.error("%s failed; %s goes on", what, self._owner, exc_info=error)
        except Exception:  # the log is what is broken
            with contextlib.suppress(OSError, ValueError):  # and so may be standard error
                traceback.print_exception(error, file=sys.stderr)

    @contextlib.contextmanager
    def guard(self, what: str) -> Iterator[None]:
        """Within it an error ends nothing but the rest of the block. It is logged once, however often it comes back."""
        try:
            yield
        except Exception as error:
            self.note(what, error, once=True)
