"""Figures of a part, written to disk as they come, so that a later failure loses none. Standard library only."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypedDict

from benchmarks.gpu.work import Figures

SAFETY = 1.3  # of what the slowest piece of its kind took so far, for the next one
LEAST = 3.0  # seconds; with less nothing is begun


class Page(TypedDict):
    """Content of the file."""

    found: dict[str, float | str]
    left_out: list[str]
    failed: list[str]
    seconds: float


class Notes:
    """Figures of one part.

    Args:
        path: Path of the file.
        seconds: Available time; a piece that may take longer than the rest is not begun.
        now: The clock, in seconds.
    """

    def __init__(self, path: Path, seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self._path, self._now, self._start, self._seconds = path, now, now(), seconds
        self._slowest: dict[str, float] = {}
        self.page = Page(found={}, left_out=[], failed=[], seconds=0.0)
        self._keep()

    def attempt(self, name: str, work: Callable[[], Figures], like: str = "") -> bool:
        """Do a piece, and keep what it finds. What it raises is kept in the place of figures, and nothing else ends.

        Args:
            name: Name of the piece.
            work: Gives figures by the names of their rows.
            like: Kind of the piece: it is expected to take as long as the slowest one of that kind did.

        Returns:
            Whether it came to its end.
        """
        start = self._now()
        needs = SAFETY * self._slowest.get(like, 0.0) if like else 0.0
        if self._start + self._seconds - start < max(LEAST, needs):
            self.page["left_out"].append(name)
            self._keep()
            return False
        try:
            self.page["found"].update(work())
        except Exception as error:  # any error of an untried device or peer; reported below
            traceback.print_exc(file=sys.stderr)
            lines = str(error).strip().splitlines() or [""]
            self.page["found"][name] = f"{type(error).__name__}: {lines[0][:120]}"
            self.page["failed"].append(name)
        self._slowest[like] = max(self._slowest.get(like, 0.0), self._now() - start)
        self._keep()
        return name not in self.page["failed"]

    def tell(self, name: str, value: float | str) -> None:
        """Keep one figure, or a remark."""
        self.page["found"][name] = value
        self._keep()

    def _keep(self) -> None:
        """Write a new file and rename it over the old one, so that a reader always finds a complete file."""
        self.page["seconds"] = round(self._now() - self._start, 1)
        beside = self._path.with_suffix(".new")
        beside.write_text(json.dumps(self.page, indent=1), "utf-8")
        os.replace(beside, self._path)


def read(path: Path) -> Page | None:
    """Return what a part has written, or None if it has written no file."""
    return json.loads(path.read_text("utf-8")) if path.exists() else None
