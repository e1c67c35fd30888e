"""Pauses of generation: an engine client takes no step until it is resumed, or the maximum duration has passed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from megatron_ext.errors import ConfigError, EngineClosed

PauseMode = Literal["keep", "abort"]
"""Mode of a pause: requests keep their memory and wait, or end as ABORTED with the tokens that they have."""

ABORT = "abort"  # finish reason of requests that a pause has ended


@dataclass(eq=False)
class Pause:
    """Pause of generation.

    Args:
        max_seconds: Maximum duration in seconds; None for no limit.
        mode: Whether requests wait or end.

    Raises:
        ConfigError: The duration is not positive, or longer than a timer can wait; or there is no such mode.
    """

    max_seconds: float | None = None
    mode: PauseMode = "keep"
    _timer: threading.Timer | None = None

    def __post_init__(self) -> None:
        if self.max_seconds is not None and not 0 < self.max_seconds <= threading.TIMEOUT_MAX:
            limit = f"more than 0 and at most {threading.TIMEOUT_MAX:.0f}"
            raise ConfigError(f"max_seconds is {self.max_seconds}, and must be {limit}, or None for no limit")
        if self.mode not in get_args(PauseMode):
            raise ConfigError(f"mode is {self.mode!r}, and must be keep or abort")

    def start(self, on_timeout: Callable[[], object]) -> None:
        """Call `on_timeout` in a thread of its own after the maximum duration, unless the pause is cancelled.

        It may raise `EngineClosed`.
        """
        if self.max_seconds is not None:
            self._timer = threading.Timer(self.max_seconds, self._time_out, [on_timeout])
            self._timer.daemon = True
            self._timer.start()

    @staticmethod
    def _time_out(on_timeout: Callable[[], object]) -> None:
        with contextlib.suppress(EngineClosed):
            on_timeout()

    def cancel(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
