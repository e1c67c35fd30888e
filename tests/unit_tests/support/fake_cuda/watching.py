"""What the fake device was asked to do, counted by place, and refused where a real one would refuse."""

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
_ON_ITS_WAY = str(ROOT / "megatron_ext" / "ops" / "transfer.py")  # whoever calls it is of interest
_COPIES = "asynchronous copy"
# As `torch.cuda.set_sync_debug_mode` sees it: what makes the host wait.
_WAITS = ("waits", "copy to the device that waits", "copy to the host that waits", "index from the host")
# A graph would keep the address of memory that is somebody else's by the time it runs.
_NOT_IN_A_GRAPH = (*_WAITS, "copy from memory that is not pinned", f"{_COPIES} to the device", f"{_COPIES} to the host")


class Note(NamedTuple):
    """Something that the device was asked to do.

    Attributes:
        kind: What it costs; see `device.cpp`.
        what: The operation, or the host's memory.
        place: The innermost function of this package, as "path:function", or of another one if none of ours called.
    """

    kind: str
    what: str
    place: str


class PinnedMemoryError(RuntimeError):
    """A pinned buffer was touched while a copy from or to it was on its way."""


class _State:
    """What is being watched in this process."""

    def __init__(self) -> None:
        self.notes: Counter[Note] = Counter()
        self.tape: Tape | None = None  # of the graph that is being captured
        self.sync_mode = "default"
        self.unseen = 0  # depth of what is the tests' own

    @property
    def is_capturing(self) -> bool:
        """Whether what runs becomes part of a graph."""
        return self.tape is not None

    def launched(self, kernel: Callable[[], object]) -> None:
        """A kernel runs, which is no operation of torch's."""
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
    """The host has waited for all copies up to this one.

    Raises:
        PinnedMemoryError: Somebody did not.
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
    """What is noted within."""
    before, STATE.notes = STATE.notes, Counter()
    found = STATE.notes
    try:
        yield found
    finally:
        STATE.notes = before + found


@contextmanager
def unwatched() -> Iterator[None]:
    """Within it a test looks at the device, which is no concern of the engine's."""
    STATE.unseen += 1
    try:
        yield
    finally:
        STATE.unseen -= 1


def waits(notes: Counter[Note]) -> dict[Note, int]:
    """Those of them that made the host wait for the device."""
    return {one: count for one, count in notes.items() if one.kind in _WAITS}


def _place() -> str:
    frame = sys._getframe(2)
    outside = None
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(str(ROOT / "megatron_ext")) and path != _ON_ITS_WAY:
            return f"{Path(path).relative_to(ROOT)}:{frame.f_code.co_name}"
        if outside is None and not path.startswith(_OWN) and "/torch/" not in path:
            outside = f"{path}:{frame.f_code.co_name}"
        frame = frame.f_back
    return outside or "unknown"
