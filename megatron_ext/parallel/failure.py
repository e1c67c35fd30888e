"""Shutdown after a rank fails: report the first failure once and exit on every rank.

A failing rank writes its report to the store of torch.distributed, which outlives connections, before it exits; the
first report counts for all ranks. The other ranks notice lost connections, read the report, and exit silently. If there
is no report, the remaining ranks sign as alive, and the first of them reports the ranks that have not signed.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist

from megatron_ext.errors import ConfigError, OutputError, RankError, describe
from megatron_ext.signals import Interrupted

FAILED, BAD_USAGE = 1, 2  # exit codes
PATIENCE = 3.0  # seconds to wait for another rank's report
_LOOK_AGAIN = 0.05  # seconds between two polls
_SILENCE = re.compile(r"[Tt]imed out|Wait timeout")
_LOST_PEER = re.compile(rf"gloo.transport|NCCL|Connection (reset|closed|refused)|Broken pipe|{_SILENCE.pattern}")


@dataclass(frozen=True)
class FailureReport:
    """Failure that one rank reports for all."""

    rank: int
    exit_code: int
    message: str


class RankRegistry:
    """Shared registry of the ranks' processes and the failure report.

    Args:
        store: Store of all ranks.
        rank: This rank.
        size: Number of ranks of the world.
    """

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self.rank = rank
        self._store = dist.PrefixStore("megatron_ext", store)
        self._size = size

    def sign_in(self) -> None:
        """Record this rank's host and process id."""
        self._store.set(f"process/{self.rank}", json.dumps([socket.gethostname(), os.getpid()]))

    def claim(self, report: FailureReport) -> FailureReport:
        """Store the report unless there is one already; return the report that counts."""
        own_report = json.dumps(asdict(report))
        return FailureReport(**json.loads(self._store.compare_set("last words", "", own_report)))

    def claimed(self) -> FailureReport | None:
        """Return the stored report; None if no rank has stored one."""
        if not self._store.check(["last words"]):
            return None
        return FailureReport(**json.loads(self._store.get("last words")))

    def sign(self) -> None:
        """Record that this rank is alive after it has lost another one."""
        self._store.set(f"alive/{self.rank}", "")

    def unsigned(self) -> list[int]:
        """Return the ranks that have not signed."""
        return [rank for rank in range(self._size) if not self._store.check([f"alive/{rank}"])]

    def has_ended(self, rank: int) -> bool:
        """Return whether a rank's process has ended; False if it ran on another machine, where this is unknown."""
        if not self._store.check([f"process/{rank}"]):
            return False
        host, pid = json.loads(self._store.get(f"process/{rank}"))
        if host != socket.gethostname():
            return False
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
        except OSError:
            return True


def sign_in() -> None:
    """Record this rank's process once torch.distributed is initialized; a world of one needs no record."""
    if not _is_alone():
        _registry().sign_in()


@contextmanager
def ending_together(minutes: float) -> Iterator[None]:
    """End all ranks if anything raises on one of them inside this context; a no-op in a world of one.

    Args:
        minutes: Time that a rank waits for another one.

    Raises:
        RankError: The message to print on this rank, if any, and its exit code.
        Interrupted: On rank 0, if it was asked to end before any rank failed.
        OutputError: Passed through.
    """
    try:
        yield
    except OutputError:  # all steps are done, and rank 0 has the results
        raise
    except (Interrupted, KeyboardInterrupt, SystemExit) as ending:
        if _is_alone() or _may_say(ending):
            raise
        raise RankError("", exit_code=getattr(ending, "exit_code", FAILED)) from None
    except Exception as error:
        if _is_alone():
            raise
        registry = _registry()
        try:
            report = _failure_report(registry, error, minutes)
        except dist.DistError:
            report = _without_registry(registry.rank, error)
        raise RankError(report.message if report.rank == registry.rank else "", exit_code=report.exit_code) from error


def _is_alone() -> bool:
    return not dist.is_initialized() or dist.get_world_size() == 1


def _registry() -> RankRegistry:
    world_group = dist.group.WORLD
    assert world_group is not None, "torch.distributed has been started"
    return RankRegistry(world_group.get_group_store(), dist.get_rank(), dist.get_world_size())


def _may_say(ending: BaseException) -> bool:
    """Return whether this rank reports the request to end: it is rank 0, and no other report came first."""
    registry = _registry()
    report = FailureReport(registry.rank, getattr(ending, "exit_code", FAILED), str(ending))
    return registry.rank == 0 and registry.claim(report) == report


def _failure_report(registry: RankRegistry, error: Exception, minutes: float) -> FailureReport:
    """Return the failure report that counts, by this rank or by another one."""
    root = _root(error)
    if _is_lost_peer(root):
        return _after_others(registry, root, minutes)
    if isinstance(root, ConfigError):
        # Most mistakes occur on all ranks alike, and the first rank reports them.
        report = _wait_for(registry.claimed, PATIENCE) if registry.rank else None
        message = str(root) if registry.rank == 0 else f"rank {registry.rank}: {root}"
        return report or registry.claim(FailureReport(registry.rank, BAD_USAGE, message))
    message = str(root) if isinstance(root, RankError) else f"rank {registry.rank}: {describe(root)}"
    return registry.claim(FailureReport(registry.rank, FAILED, message))


def _without_registry(rank: int, error: Exception) -> FailureReport:
    """Return a report if the store is lost, too: without torchrun it lives in rank 0's process."""
    root = _root(error)
    if not _is_lost_peer(root):
        return FailureReport(rank, FAILED, f"rank {rank}: {describe(root)}")
    return FailureReport(1, FAILED, "rank 0, which stores the failure reports, ended without a message")


def _after_others(registry: RankRegistry, error: BaseException, minutes: float) -> FailureReport:
    """Return the report after another rank failed first: its own report, or one derived from missing signatures."""
    registry.sign()
    report = _wait_for(registry.claimed, PATIENCE)
    if report is not None:
        return report
    unsigned = registry.unsigned()
    ended = [rank for rank in unsigned if registry.has_ended(rank)]
    # A rank that died while this one waited for its connection looks silent: check the process before the error.
    if not ended and _SILENCE.search(str(error)):
        message = f"{_names(unsigned)} did not answer within {minutes:g} minutes (--distributed-timeout-minutes)"
    else:
        message = f"{_names(ended or unsigned)} ended without a message"
    return registry.claim(FailureReport(registry.rank, FAILED, message))


def _names(ranks: Sequence[int]) -> str:
    """Format ranks as the subject of a sentence."""
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}" if ranks else "a rank"


def _wait_for(look: Callable[[], FailureReport | None], seconds: float) -> FailureReport | None:
    deadline = time.monotonic() + seconds
    found = look()
    while found is None and time.monotonic() < deadline:
        time.sleep(_LOOK_AGAIN)
        found = look()
    return found


def _root(error: BaseException) -> BaseException:
    """Return the root cause of an error."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _is_lost_peer(error: BaseException) -> bool:
    """Return whether an error means only that another rank is gone or silent."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and _LOST_PEER.search(str(error)) is not None
    )
