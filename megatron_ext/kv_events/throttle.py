"""Throttle of log lines that a peer could otherwise cause without end."""

from __future__ import annotations

import time
from collections.abc import Callable

INTERVAL = 60.0  # seconds between two lines


class Throttle:
    """Limit of log lines on one subject: the first occurrence is logged, later ones once in an interval.

    Args:
        clock: Clock in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._silent_until = float("-inf")
        self._unlogged = 0

    def admit(self) -> int:
        """Count an occurrence.

        Returns:
            Number of occurrences that a line logged now covers; 0 if no line is due.
        """
        self._unlogged += 1
        now = self._clock()
        if now < self._silent_until:
            return 0
        covered, self._unlogged = self._unlogged, 0
        self._silent_until = now + INTERVAL
        return covered
