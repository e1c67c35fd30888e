"""Signs of life of the parts of a replica, at the times of its health checks. Needs neither Ray nor torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

_MIN_LOOKS = 3  # without a sign of life: a replica that was stopped itself has looked at nothing meanwhile


@dataclass
class _Part:
    last_sign: float
    looks: int = 0


class Liveness:
    """Times since the last signs of life.

    Args:
        patience: Maximum time in seconds without a sign of life.
        clock: Current time in seconds.
    """

    def __init__(self, patience: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._patience = patience
        self._clock = clock
        self._parts: dict[str, _Part] = {}

    def look(self, part: str, *, is_alive: bool) -> None:
        """Note whether a part has given a sign of life since the last look."""
        if is_alive or part not in self._parts:
            self._parts[part] = _Part(self._clock())
        else:
            self._parts[part].looks += 1

    def silent(self) -> list[str]:
        """Return the parts that have been silent for too long."""
        now = self._clock()
        return [
            name
            for name, part in self._parts.items()
            if part.looks >= _MIN_LOOKS and now - part.last_sign > self._patience
        ]
