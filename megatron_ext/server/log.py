"""Log lines: timestamped, short, printable characters only; repeated lines are suppressed and counted."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable
from contextvars import ContextVar
from types import TracebackType

LONGEST_MESSAGE = 2000  # characters
LONGEST_TRACEBACK = 8000
TRACEBACK_FRAMES = 20  # the innermost; a RecursionError has thousands
REPEATS = 5  # records of one place in the code ...
WINDOW = 60.0  # ... in this many seconds

# Id that a client or a proxy has given to the request whose code logs; empty elsewhere.
REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")

# Loggers of uvicorn and asyncio that log each bad request or connection: clients control their rate.
NOISY_LOGGERS = ("asyncio", "uvicorn.error")


def printable(text: str, limit: int) -> str:
    """Return a text that a terminal shows literally: without control or bidirectional characters, cut at `limit`.

    Args:
        text: Untrusted text.
        limit: Characters of `text` that are kept; the number of dropped ones is appended.
    """
    kept = text[:limit]
    if not kept.isprintable():
        kept = "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in kept)
    return kept if len(text) <= limit else f"{kept}... ({len(text) - limit} more characters)"


class LineFormatter(logging.Formatter):
    """Formatter with one line for each record; tracebacks are indented, so that no text can imitate a record."""

    default_msec_format = "%s.%03d"

    def format(self, record: logging.LogRecord) -> str:
        """Return time, level, logger, message, and the id of the request."""
        message = printable(record.getMessage().rstrip("\n"), LONGEST_MESSAGE)
        if request_id := REQUEST_ID.get():
            message += f" request={request_id}"
        line = f"{self.formatTime(record)} {record.levelname} {record.name}: {message}"
        return line + self.formatException(record.exc_info) if record.exc_info else line

    def formatException(  # noqa: N802 - logging's name
        self, ei: tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
    ) -> str:
        """Return the innermost frames of a traceback."""
        text = "".join(traceback.format_exception(*ei, limit=-TRACEBACK_FRAMES))
        left_out = len(text) - LONGEST_TRACEBACK
        lines = [f"... ({left_out} more characters)"] if left_out > 0 else []
        lines += text[-LONGEST_TRACEBACK:].split("\n")
        return "".join(f"\n    {printable(line, LONGEST_MESSAGE)}" for line in lines if line)


class RateLimitFilter(logging.Filter):
    """Filter that passes the first few records of each place in the code, in each window of time.

    The next record that passes says how many were suppressed.

    Args:
        limit: Records of one place in a window.
        seconds: Length of a window.
        clock: Monotonic clock, in seconds.
    """

    def __init__(
        self, limit: int = REPEATS, seconds: float = WINDOW, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._max = limit
        self._seconds = seconds
        self._clock = clock
        self._windows: dict[tuple[str, int], tuple[float, int]] = {}  # place -> start of its window, records in it

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record passes."""
        now, place = self._clock(), (record.pathname, record.lineno)
        start, count = self._windows.get(place, (now, 0))
        left_out = 0
        if now - start >= self._seconds:
            left_out, start, count = max(0, count - self._max), now, 0
        self._windows[place] = start, count + 1
        if left_out:
            record.msg, record.args = f"{record.getMessage()} ({left_out} more such lines were left out)", ()
        return count < self._max


def set_up_logging(level: str) -> None:
    """Log to standard error.

    Args:
        level: Minimum level of this package's records; other packages log from warnings on.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter())
    logging.basicConfig(handlers=[handler])
    logging.getLogger("megatron_ext").setLevel(level.upper())
    bounded = RateLimitFilter()
    for name in NOISY_LOGGERS:
        logging.getLogger(name).addFilter(bounded)
