"""Worlds of several ranks for tests: processes that run one function, each with its own view of the world.

    def both(count):  # of a module, so that ranks can import it
        platform.initialize(tensor_model_parallel_size=2)
        ...
        return tokens

    pytestmark = pytest.mark.worlds
    first, second = run_ranks(both, 2, 5)

Ranks are forked from a server process (`tests/forked.py`), meet over a file, not a port, and have one thread each.
Every world has a deadline, and ends before `run_ranks` returns. Tests that start one have the mark `worlds` (see
`tests/worlds.py`).
"""

from __future__ import annotations

import os
import pickle
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import connection, context
from pathlib import Path

from megatron_ext.ops import cpp
from tests import worlds
from tests.forked import fork, spawn
from tests.unit_tests.support.rank_process import RankTask, Report, run_rank

DEADLINE = 240.0  # seconds, for a loaded machine; only a world that hangs takes as long
GRACE = 60.0  # seconds that the other ranks have when one has failed; only ranks that hang take as long
# What a rank says when another one is gone.
LOST_PEER = re.compile(
    r"Connection (reset|closed|refused)|closed by peer|Broken pipe|Timed out|timed out", re.IGNORECASE
)


@dataclass(frozen=True)
class Outcome:
    """Outcome of one rank.

    Attributes:
        exit_code: Exit code of the process; negative for a signal.
        was_killed: True if killed at the deadline or some time after another rank failed.
        ended_at: Time by the clock that all processes of the machine share.
        report: None if the process ended without one.
        stdout, stderr: Everything that the rank wrote.
        stacks: Stacks of its threads shortly before the deadline; empty if it had ended by then.
    """

    rank: int
    exit_code: int
    was_killed: bool
    ended_at: float
    report: Report | None
    stdout: str
    stderr: str
    stacks: str

    @property
    def is_ok(self) -> bool:
        return self.exit_code == 0 and self.report is not None

    @property
    def value(self) -> object:
        assert self.report is not None, self.describe()
        return self.report.value

    @property
    def cause(self) -> str:
        """Cause of the failure in one line."""
        if self.report is not None and self.report.error:
            return self.report.summary
        if self.was_killed:
            return "did not end, and was killed"
        if self.exit_code < 0:
            return f"ended by signal {-self.exit_code}"
        return f"exit code {self.exit_code}"

    @property
    def order(self) -> tuple[bool, bool, float]:
        """The smallest is the root of what went wrong: lost connections and kills come of other ranks' failures."""
        lost_peer = self.report is not None and LOST_PEER.search(self.report.summary) is not None
        at = self.report.at if self.report is not None and self.report.error else self.ended_at
        return lost_peer, self.was_killed, at

    def describe(self) -> str:
        traceback = self.report.error if self.report is not None else ""
        parts = [f"rank {self.rank}: {self.cause}", traceback, self.stacks if self.was_killed else "", self.stderr]
        return "\n".join(part.rstrip() for part in parts if part)


class RanksFailed(AssertionError):
    """Failure of at least one rank. The message begins with the root of it.

    Attributes:
        outcomes: Outcomes of all ranks, in order.
        root: Rank that failed first.
    """

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        self.outcomes = outcomes
        failed = sorted((one for one in outcomes if not one.is_ok), key=lambda one: one.order)
        self.root = failed[0]
        super().__init__("\n\n".join(one.describe() for one in failed))


def run_ranks(function: Callable[..., object], size: int, *arguments: object, **options: object) -> list[object]:
    """Call a function of a module on every rank of a world; what each returned. For `options` see `run_world`.

    torch.distributed is initialized when it is called, `platform.initialize` is the function's own affair.

    Raises:
        RanksFailed: A rank raised, ended by a signal, hung or left with an exit code.
    """
    outcomes = run_world(function, size, *arguments, **options)
    if not all(one.is_ok for one in outcomes):
        raise RanksFailed(outcomes)
    return [one.value for one in outcomes]


def run_at_once(worlds_by_name: Mapping[str, Callable[[], list[Outcome]]]) -> dict[str, list[Outcome]]:
    """Worlds that wait for most of their lives, beside one another: how the ranks of each ended.

    Args:
        worlds_by_name: Functions to call, each with one `run_world` in it.
    """
    with ThreadPoolExecutor(len(worlds_by_name)) as pool:
        running = {name: pool.submit(call) for name, call in worlds_by_name.items()}
        return {name: one.result() for name, one in running.items()}


def run_world(
    function: Callable[..., object],
    size: int,
    *arguments: object,
    deadline: float = DEADLINE,
    grace: float = GRACE,
    meet: bool = True,
    hash_seeds: Sequence[int] | None = None,
) -> list[Outcome]:
    """Run a function on all ranks and return how each rank ended, for tests of failures.

    Args:
        function: Function; it, its arguments and its result can be pickled.
        size: Number of ranks.
        arguments: Arguments, equal on all ranks.
        deadline: Seconds until ranks that have not ended are killed.
        grace: Seconds left to the other ranks when one has failed.
        meet: True if torch.distributed is initialized.
        hash_seeds: PYTHONHASHSEED of each rank. Ranks are then started by exec and import everything themselves.
    """
    is_test = "PYTEST_CURRENT_TEST" in os.environ
    assert worlds.is_held() or not is_test, f"a test that starts ranks has the mark `{worlds.MARK}`"
    cpp.are_used()  # compiled now where that was never done, not by every rank while its deadline comes near
    call = pickle.dumps((function, arguments))
    with tempfile.TemporaryDirectory(prefix="world.") as folder:
        tasks = [RankTask(rank, size, Path(folder), deadline, call, meet) for rank in range(size)]
        processes = _start(tasks, hash_seeds)
        try:
            killed, ended_at = _wait(processes, time.monotonic() + deadline, grace)
        finally:
            for process in processes:
                process.kill()
                process.join()
        return [_outcome(*one) for one in zip(tasks, processes, killed, ended_at, strict=True)]


def _start(tasks: Sequence[RankTask], hash_seeds: Sequence[int] | None) -> list[context.Process]:
    if hash_seeds is None:
        return [fork(run_rank, task) for task in tasks]
    seeded = zip(tasks, hash_seeds, strict=True)
    return [spawn(run_rank, task, PYTHONHASHSEED=str(seed)) for task, seed in seeded]


def _wait(processes: Sequence[context.Process], deadline: float, grace: float) -> tuple[list[bool], list[float]]:
    """Wait for all, and kill those that are late: which were killed, and when each ended."""
    killed, ended_at = [False] * len(processes), [0.0] * len(processes)
    running = dict(enumerate(processes))
    while running:
        connection.wait([one.sentinel for one in running.values()], max(0.0, deadline - time.monotonic()))
        for rank, process in list(running.items()):
            if process.exitcode is not None:
                ended_at[rank] = time.monotonic()
                del running[rank]
                if process.exitcode != 0:
                    deadline = min(deadline, ended_at[rank] + grace)
        if time.monotonic() >= deadline:
            for rank, process in running.items():
                killed[rank] = True
                process.kill()
                process.join()
    return killed, ended_at


def _outcome(task: RankTask, process: context.Process, was_killed: bool, ended_at: float) -> Outcome:
    report = task.path("report")
    return Outcome(
        rank=task.rank,
        exit_code=process.exitcode,
        was_killed=was_killed,
        ended_at=ended_at,
        report=pickle.loads(report.read_bytes()) if report.exists() else None,
        **{kind: _text(task.path(kind)) for kind in ("stdout", "stderr", "stacks")},
    )


def _text(path: Path) -> str:
    return path.read_text("utf-8", errors="replace") if path.exists() else ""
