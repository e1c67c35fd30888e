"""Benchmark cases: registration, settings, and the figures that a run writes. Standard library only.

A case is a function `measure(run, setting=default, ...)` that reports rows of figures to its `Run`. Peers run cases in
environments without torch or this package, so this module imports neither.
"""

from __future__ import annotations

import inspect
import json
import os
import random
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, TypedDict

Figure: TypeAlias = "float | int | str | bool | None"
Rows: TypeAlias = "dict[str, dict[str, Figure]]"
"""Figures by row and column; columns name their units. False is a failed check."""

VOCABULARY = 4096
SAFETY = 1.3  # factor on the time of the slowest attempt of a kind, to predict the next one
LEAST_SECONDS = 3.0  # with less time nothing is begun


class Page(TypedDict):
    """Content of a figures file.

    rows: Figures.
    remarks: Lines about how they were measured.
    left_out: Attempts without time.
    failed: Errors by the name of the attempt.
    seconds: Duration so far.
    """

    rows: Rows
    remarks: list[str]
    left_out: list[str]
    failed: dict[str, str]
    seconds: float


def empty_page() -> Page:
    """Return a page without figures."""
    return Page(rows={}, remarks=[], left_out=[], failed={}, seconds=0.0)


class Run:
    """Run of one case; each figure is written to disk as it comes, so that a later failure loses none.

    Args:
        path: Figures file; None keeps the figures in memory.
        seconds: Available time; an attempt that may take longer than the rest is not begun.
        quick: True to do so little that only errors show.
        now: Clock, in seconds.
    """

    def __init__(
        self,
        path: Path | None = None,
        seconds: float = float("inf"),
        *,
        quick: bool = False,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.is_quick = quick
        self.page = empty_page()
        self._path, self._seconds, self._now, self._start = path, seconds, now, now()
        self._slowest: dict[str, float] = {}
        self._write()

    def row(self, name: str, figures: Mapping[str, Figure]) -> None:
        """Report figures of a row; later figures of the same row are added."""
        self.page["rows"].setdefault(name, {}).update(figures)
        self._write()

    def remark(self, text: str) -> None:
        """Report a line about how the figures were measured."""
        self.page["remarks"].append(text)
        self._write()

    def attempt(self, name: str, work: Callable[[], object], like: str = "") -> bool:
        """Run a part of the case; its error is reported in the place of its figures, and the case continues.

        Args:
            name: Name of the part.
            work: Function that reports rows.
            like: Kind of the part: it is expected to take as long as the slowest part of that kind.

        Returns:
            True if it came to its end.
        """
        start = self._now()
        needed = SAFETY * self._slowest.get(like, 0.0) if like else 0.0
        if self._start + self._seconds - start < max(LEAST_SECONDS, needed):
            self.page["left_out"].append(name)
            self._write()
            return False
        try:
            work()
        except Exception as error:  # any error of an untried device or peer
            traceback.print_exc(file=sys.stderr)
            first_line = (str(error).strip().splitlines() or [""])[0]
            self.page["failed"][name] = f"{type(error).__name__}: {first_line[:120]}"
        self._slowest[like] = max(self._slowest.get(like, 0.0), self._now() - start)
        self._write()
        return name not in self.page["failed"]

    def _write(self) -> None:
        """Replace the file by a complete new one."""
        self.page["seconds"] = round(self._now() - self._start, 1)
        if self._path is not None:
            new = self._path.with_suffix(".new")
            new.write_text(json.dumps(self.page, indent=1), "utf-8")
            os.replace(new, self._path)


@dataclass(frozen=True)
class Case:
    """Benchmark case.

    Attributes:
        name: `question.function`.
        measure: Function that measures.
        quick: Settings of `--quick`.
        in_bench: True if `make bench` measures it.
        beside: Case whose equal rows and columns it is compared with.
        reserved: Seconds that are kept for it while earlier cases run.
        needs_cuda: True if its figures mean nothing without a CUDA device.
        model: Key in `benchmarks.peers.sizes.SIZES` of the model that the case gets as its setting `model`.
        interpreter: Environment variable with the Python that runs it; by default this one does.
        packages: Environment variable with a folder that comes first on its PYTHONPATH.
        preloads: Environment variable with libraries that its process is started with.
        published: Environment variable with the folder of the published model that it measures.
    """

    name: str
    measure: Callable[..., None]
    quick: Mapping[str, Any] = field(default_factory=dict)
    in_bench: bool = False
    beside: str | None = None
    reserved: float = 0.0
    needs_cuda: bool = False
    model: str | None = None
    interpreter: str | None = None
    packages: str | None = None
    preloads: str | None = None
    published: str | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """Settings and their defaults."""
        return {one.name: one.default for one in list(inspect.signature(self.measure).parameters.values())[1:]}

    @property
    def summary(self) -> str:
        """First line of the docstring."""
        return (self.measure.__doc__ or "").strip().splitlines()[0]

    def parse(self, given: Mapping[str, str]) -> dict[str, Any]:
        """Return settings with the types of their defaults; settings of other cases are ignored.

        Raises:
            ValueError: A value has another type.
        """
        known = self.settings
        return {name: _parsed(name, text, known[name]) for name, text in given.items() if name in known}

    def run(self, run: Run, given: Mapping[str, str]) -> None:
        """Measure; an error of the case is reported as failed."""
        settings = {**(self.quick if run.is_quick else {}), **self.parse(given)}
        run.attempt("case", lambda: self.measure(run, **settings))


def _parsed(name: str, text: str, default: object) -> object:
    kind = type(default)
    try:
        if isinstance(default, bool):
            return {"true": True, "false": False}[text.lower()]
        if isinstance(default, tuple):
            return tuple(type(default[0])(one) for one in text.split(","))
        return kind(text)
    except (ValueError, KeyError):
        raise ValueError(f"{name}={text}: expected a value like {default!r}") from None


CASES: dict[str, Case] = {}


def case(question: str, **attributes: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function as a case of a question; see `Case` for the attributes."""

    def register(measure: Callable[..., None]) -> Callable[..., None]:
        name = f"{question}.{measure.__name__}"
        CASES[name] = Case(name, measure, **attributes)
        return measure

    return register


def token_ids(count: int, name: str, vocabulary: int = VOCABULARY) -> list[int]:
    """Return token ids that depend on the name only, the same in every process."""
    source = random.Random(name)
    return [source.randrange(8, vocabulary) for _ in range(count)]
