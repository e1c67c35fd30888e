"""Cells that two programs of one kernel launch share, found under Triton's interpreter from the addresses they use.

A device runs programs in any order and at once, so no program may write a cell that another one reads or writes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest


class SharedCellError(AssertionError):
    """Two programs of one launch share a cell that one of them writes."""


class _Logged:
    """Stand-in for the interpreter's loads and stores that notes addresses by program."""

    def __init__(self, plain: object) -> None:
        self._plain = plain
        self.start()

    def start(self) -> None:
        """Begin a launch."""
        self.program = -1
        self.reads: list[tuple[int, np.ndarray]] = []
        self.writes: list[tuple[int, np.ndarray]] = []

    def load(self, pointers: np.ndarray, mask: np.ndarray, *more: object) -> np.ndarray:
        self.reads.append((self.program, _chosen(pointers, mask)))
        return self._plain.load(pointers, mask, *more)  # type: ignore[attr-defined, no-any-return]

    def store(self, pointers: np.ndarray, values: np.ndarray, mask: np.ndarray) -> None:
        self.writes.append((self.program, _chosen(pointers, mask)))
        self._plain.store(pointers, values, mask)  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> object:
        return getattr(self._plain, name)

    def check(self, name: str) -> None:
        """Raise if two programs share a cell that one of them writes."""
        written, writers = _joined(self.writes)
        order = np.lexsort((writers, written))
        written, writers = written[order], writers[order]
        twice = (written[1:] == written[:-1]) & (writers[1:] != writers[:-1])
        if twice.any():
            one, other = writers[:-1][twice][0], writers[1:][twice][0]
            raise SharedCellError(f"programs {one} and {other} of {name} write the same cell")
        read, readers = _joined(self.reads)
        first = np.searchsorted(written, read)
        is_written = np.searchsorted(written, read, side="right") > first
        read, readers, owners = read[is_written], readers[is_written], writers[first[is_written]]
        if (readers != owners).any():
            one, other = next(pair for pair in zip(readers, owners, strict=True) if pair[0] != pair[1])
            raise SharedCellError(f"program {one} of {name} reads a cell that program {other} writes")


def _chosen(pointers: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return the addresses that a mask leaves; the interpreter's masks may be integers, which would be indices."""
    return pointers[np.broadcast_to(mask, pointers.shape).astype(bool)]


def _joined(parts: list[tuple[int, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Return addresses and their programs."""
    if not parts:
        return np.zeros(0, np.uint64), np.zeros(0, np.int64)
    addresses = np.concatenate([one.reshape(-1) for _, one in parts])
    return addresses, np.repeat([program for program, _ in parts], [one.size for _, one in parts])


@contextlib.contextmanager
def no_shared_cells() -> Iterator[list[str]]:
    """Check every launch within the context; the list names the checked kernels.

    Raises:
        SharedCellError: At the end of a launch with a shared cell.
    """
    from triton.runtime import interpreter

    logged, builder = _Logged(interpreter._interpreter), interpreter.interpreter_builder
    run, place, launched = interpreter.GridExecutor.__call__, builder.set_grid_idx, list[str]()

    def launch(self: object, *arguments: object, **more: object) -> None:
        logged.start()
        run(self, *arguments, **more)
        name = self.fn.__name__  # type: ignore[attr-defined]
        logged.check(name)
        launched.append(name)

    def next_program(*index: int) -> None:
        logged.program += 1
        place(*index)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_interpreter", logged)
        patch.setattr(interpreter.GridExecutor, "__call__", launch)
        patch.setattr(builder, "set_grid_idx", next_program)
        yield launched
