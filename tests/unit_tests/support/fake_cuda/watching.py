"""Operations of the fake device, counted by place, and refused where a real device would refuse."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from tests.unit_tests.support.replay import Tape

ROOT = Path(__file__).parents[4]
_OWN = str(Path(__file__).parent)
_ON_ITS_WAY = "to_device"  # function of `ops/varlen.py` whose caller is of interest
_COPIES = "asynchronous copy"
# As `torch.cuda.set_sync_debug_mode` sees it: what makes the host wait.
_WAITS = ("waits", "copy to the device that waits", "copy to the host that waits", "index from the host")
# A graph would keep the address of memory that has another owner by the time it runs.
_NOT_IN_A_GRAPH = (*_WAITS, "copy from memory that is not pinned", f"{_COPIES} to the device", f"{_COPIES} to the host")


class Note(NamedTuple):
    """Something that the device was asked to do.

    Attributes:
        kind: Kind of cost; see `device.cpp`.
        what: The operation, or the host's memory.
        place: The innermost function of this package, as "path:function", or of another one if none of ours called.
    """

    kind: str
    what: str
    place: str


class PinnedMemoryError(RuntimeError):
    """A pinned buffer was touched while a copy from or to it was on its way."""


class _State:
    """State of the watching in this process."""

    def __init__(self) -> None:
        self.notes: Counter[Note] = Counter()
        self.tape: Tape | None = None  # of the graph that is being captured
        self.sync_mode = "default"
        self.unseen = 0  # depth of what is the tests' own

    @property
    def is_capturing(self) -> bool:
        """True while operations become part of a graph."""
        return self.tape is not None

    def launched(self, kernel: Callable[[], object]) -> None:
        """Note that a kernel runs which is not an operation of torch."""
        if self.tape is not None:
            self.tape.note(kernel)


STATE = _State()


def note(kind: str, what: str) -> None:
    """Called by the device."""
    if STATE.unseen:
        return
    found = Note(kind, what, _place())
    STATE.notes[found] += 1
    if STATE.is_capturing and kind in _NOT_IN_A_GRAPH:
        raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing (pretended: {found})")
    if STATE.sync_mode == "error" and kind in _WAITS:
        raise RuntimeError(f"called a synchronizing CUDA operation (pretended: {found})")


def complete(number: int) -> None:
    """Complete all copies up to this one, for which the host has waited.

    Raises:
        PinnedMemoryError: If memory was used before its copy was complete.
    """
    error_isolation = torch.ops.pretended.take_faults()
    torch.ops.pretended.complete(number)
    if error_isolation:
        copies = [str(one) for one in STATE.notes if one.kind.startswith(_COPIES)]
        raise PinnedMemoryError(
            f"pinned memory was {error_isolation[0]} before its copy was waited for; copies: {copies}"
        )


@contextmanager
def watched() -> Iterator[Counter[Note]]:
    """Collect the notes made within the context."""
    before, STATE.notes = STATE.notes, Counter()
    found = STATE.notes
    try:
        yield found
    finally:
        STATE.notes = before + found


@contextmanager
def unwatched() -> Iterator[None]:
    """Ignore device accesses within the context: they are the test's, not the engine's."""
    STATE.unseen += 1
    try:
        yield
    finally:
        STATE.unseen -= 1


def waits(notes: Counter[Note]) -> dict[Note, int]:
    """Notes of operations that made the host wait for the device."""
    return {one: count for one, count in notes.items() if one.kind in _WAITS}


def _place() -> str:
    frame = sys._getframe(1)
    outside = None
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(str(ROOT / "megatron_ext")) and frame.f_code.co_name != _ON_ITS_WAY:
            return f"{Path(path).relative_to(ROOT)}:{frame.f_code.co_name}"
        if outside is None and not path.startswith(_OWN) and "/torch/" not in path:
            outside = f"{path}:{frame.f_code.co_name}"
        frame = frame.f_back
    return outside or "unknown"
