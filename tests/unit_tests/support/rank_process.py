"""Process of one rank that `ranks.py` starts: it meets the others, calls the test's function, reports."""

from __future__ import annotations

import ctypes
import datetime
import faulthandler
import os
import pickle
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

SECONDS_FOR_A_STACK = 1.0  # a rank that hangs writes where, this long before it is killed
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


@dataclass(frozen=True)
class RankTask:
    """Task of a rank.

    Attributes:
        rank, size: Rank and number of ranks of the world.
        folder: Folder where ranks meet and leave their reports.
        seconds: Time until the rank is killed.
        call: The pickled function and its arguments.
        meet: True if torch.distributed is to be initialized before the call.
    """

    rank: int
    size: int
    folder: Path
    seconds: float
    call: bytes
    meet: bool

    def path(self, kind: str) -> Path:
        """A file of this rank: "report", "stdout" or "stderr"."""
        return self.folder / f"{kind}.{self.rank}"


@dataclass(frozen=True)
class Report:
    """Result of the call.

    Attributes:
        at: Time by the clock that all processes of the machine share.
        value: Return value.
        error: Traceback; empty if the call raised nothing.
        summary: Last line of the traceback.
        exit_code: Code of a `SystemExit`, which is not an error.
    """

    at: float
    value: object = None
    error: str = ""
    summary: str = ""
    exit_code: int = 0


def run_rank(task: RankTask) -> None:
    """The whole life of the process."""
    _end_with_parent()
    _redirect(task)
    with task.path("stacks").open("w") as stacks:
        faulthandler.dump_traceback_later(max(0.1, task.seconds - SECONDS_FOR_A_STACK), file=stacks)
        report = _call(task)
        _write(report, task.path("report"))
        if not report.error:
            _leave_together()
        faulthandler.cancel_dump_traceback_later()
    sys.exit(1 if report.error else report.exit_code)


def _call(task: RankTask) -> Report:
    try:
        if task.meet:
            _meet(task)
        function, arguments = pickle.loads(task.call)
        value = function(*arguments)
        pickle.dumps(value)
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
            return Report(time.monotonic(), exit_code=1)
        return Report(time.monotonic(), exit_code=end.code or 0)
    except BaseException as error:  # whatever it is, the test is to see it
        summary = traceback.format_exception_only(error)[-1].strip()
        return Report(time.monotonic(), error=traceback.format_exc(), summary=summary)
    return Report(time.monotonic(), value)


def _meet(task: RankTask) -> None:
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        store=torch.distributed.FileStore(str(task.folder / "store"), task.size),
        rank=task.rank,
        world_size=task.size,
        timeout=datetime.timedelta(seconds=task.seconds),
    )


def _leave_together() -> None:
    """No rank closes its connections while another still reads from them."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_initialized():
        return
    try:
        torch.distributed.barrier()
    except RuntimeError as error:  # another rank has failed, and its report says how
        print(f"no common end: {error}", file=sys.stderr)


def _write(report: Report, path: Path) -> None:
    """Whole or not at all: a rank may be killed at any moment."""
    unfinished = path.with_suffix(path.suffix + ".unfinished")
    unfinished.write_bytes(pickle.dumps(report))
    unfinished.replace(path)


def _redirect(task: RankTask) -> None:
    for descriptor, kind in ((1, "stdout"), (2, "stderr")):
        with task.path(kind).open("wb") as file:
            os.dup2(file.fileno(), descriptor)


def _end_with_parent() -> None:
    """End a rank when its parent process ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
