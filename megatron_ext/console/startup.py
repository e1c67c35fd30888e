"""Start-up on standard error: a log line for each phase with its seconds, and a progress bar on a terminal."""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

logger = logging.getLogger(__name__)

PHASES = ("import", "read", "compile", "plan")
"""Phases of every start. Where kernels are compiled, a warm-up follows, with a bar of its own."""
_FORMAT = "start: {desc} |{bar}| {elapsed}"
_REFRESH = 0.5  # seconds


class StartUp:
    """Phases of a start, from the import of heavy modules until requests are taken. A context manager.

    Args:
        is_visible: Whether this process may draw a bar: with several ranks, the first one. It does on a terminal only.
        clock: Monotonic clock, in seconds.
    """

    def __init__(self, *, is_visible: bool = True, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._last: tuple[str, float] | None = None  # phase that has ended, and its seconds
        is_drawn = is_visible and sys.stderr is not None and sys.stderr.isatty()
        self._bar = tqdm(total=len(PHASES), bar_format=_FORMAT, leave=False, disable=not is_drawn)
        self._ended = threading.Event()
        self._redirected = contextlib.ExitStack()
        if is_drawn:
            self._redirected.enter_context(logging_redirect_tqdm())
            threading.Thread(target=self._refresh, name="start-up bar", daemon=True).start()

    def __enter__(self) -> StartUp:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Run a phase, one of `PHASES` or another.

        Its line is logged when the next phase begins: a mistake of the user that is found between the two is reported
        in one line.
        """
        self._log_last()
        began = self._clock()
        self._bar.set_description_str(name)
        yield
        self._bar.update(name in PHASES)
        self._last = name, self._clock() - began

    @contextlib.contextmanager
    def importing(self) -> Iterator[None]:
        """Run the phase of imports without the garbage collector, which would search all modules several times."""
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            with self.phase("import"):
                yield
        finally:
            if was_enabled:
                gc.enable()

    def ready(self) -> None:
        """Log the end of the start, and remove the bar; later calls have no effect."""
        if not self._ended.is_set():
            self._close()
            self._log_last()
            logger.info("start: ready after %.1f s", self._clock() - self._began)

    def _log_last(self) -> None:
        if self._last is not None:
            logger.info("start: %s in %.1f s", *self._last)
        self._last = None

    def _close(self) -> None:
        if not self._ended.is_set():
            self._ended.set()
            self._bar.close()
            self._redirected.close()

    def _refresh(self) -> None:
        """Show the elapsed time until the bar is closed."""
        while not self._ended.wait(_REFRESH):
            self._bar.refresh()
