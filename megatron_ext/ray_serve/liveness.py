"""Signs of life of the parts of a replica, at the times of its health checks. Needs neither Ray nor torch."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

LOOKS = 6  # in the time without a sign of life after which a part is dead
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


@contextlib.contextmanager
def watching(
    alive: Callable[[], Mapping[str, bool]], patience: float, on_silence: Callable[[list[str]], object]
) -> Iterator[None]:
    """Watch parts during a block that does nothing for so long that it may never end.

    Args:
        alive: Returns for each part whether it has given a sign of life since the last call; called in a thread.
        patience: See `Liveness`.
        on_silence: Called in that thread, once, with the names of the parts that have been silent for too long.
    """
    has_ended, liveness = threading.Event(), Liveness(patience)

    def watch() -> None:
        while not has_ended.wait(patience / LOOKS):
            for part, is_alive in alive().items():
                liveness.look(part, is_alive=is_alive)
            if silent := liveness.silent():
                on_silence(silent)
                return

    thread = threading.Thread(target=watch, name="watching", daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()
