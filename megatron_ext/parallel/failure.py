"""The end of a world: one rank has failed, and each of the others must end, too, without a word beside that rank's.

Whoever fails says so in the store of torch.distributed, which outlives connections, before it ends; the first one to do
so speaks for all. The others notice lost connections, look there, and end in silence. Where nobody has said anything,
those who are left sign, and the first of them says who has not.
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

from megatron_ext.engine.error_isolation import describe
from megatron_ext.errors import ConfigError, OutputError, RankError
from megatron_ext.signals import Interrupted

FAILED, BAD_USAGE = 1, 2  # exit codes
PATIENCE = 3.0  # seconds that somebody else has to say what has happened
_LOOK_AGAIN = 0.05  # seconds
_SILENCE = re.compile(r"[Tt]imed out|Wait timeout")
_LOST_PEER = re.compile(rf"gloo.transport|NCCL|Connection (reset|closed|refused)|Broken pipe|{_SILENCE.pattern}")


@dataclass(frozen=True)
class FailureReport:
    """What one rank says for all."""

    rank: int
    exit_code: int
    message: str


class RankRegistry:
    """Where ranks leave word for each other.

    Args:
        store: Of all ranks.
        rank: This one.
        size: Of the world.
    """

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self.rank = rank
        self._store = dist.PrefixStore("megatron_ext", store)
        self._size = size

    def sign_in(self) -> None:
        """Say which process this is, for those who lose it."""
        self._store.set(f"process/{self.rank}", json.dumps([socket.gethostname(), os.getpid()]))

    def claim(self, report: FailureReport) -> FailureReport:
        """Speak for all, unless somebody does already: the words that count."""
        mine = json.dumps(asdict(report))
        return FailureReport(**json.loads(self._store.compare_set("last words", "", mine)))

    def claimed(self) -> FailureReport | None:
        """What has been said."""
        if not self._store.check(["last words"]):
            return None
        return FailureReport(**json.loads(self._store.get("last words")))

    def sign(self) -> None:
        """This rank is alive, and has lost another one."""
        self._store.set(f"alive/{self.rank}", "")

    def unsigned(self) -> list[int]:
        """Ranks that have not signed."""
        return [rank for rank in range(self._size) if not self._store.check([f"alive/{rank}"])]

    def has_ended(self, rank: int) -> bool:
        """Whether a process of this machine is gone; of others this is not known."""
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
    """Record this rank's process as soon as torch.distributed is there; a world of one needs no record."""
    if not _is_alone():
        _registry().sign_in()


@contextmanager
def ending_together(minutes: float) -> Iterator[None]:
    """Whatever raises within it on one rank ends all of them; nothing changes in a world of one.

    Args:
        minutes: That a rank waits for another one.

    Raises:
        RankError: What is left to be said on this rank, if anything, and its exit code.
        Interrupted: On rank 0, which was asked to end, and is the first to.
        OutputError: As it comes.
    """
    try:
        yield
    except OutputError:  # all is done, and rank 0 has it
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
    everybody = dist.group.WORLD
    assert everybody is not None, "torch.distributed has been started"
    return RankRegistry(everybody.get_group_store(), dist.get_rank(), dist.get_world_size())


def _may_say(ending: BaseException) -> bool:
    """Whether it is for this rank to say that it was asked to end: it is the first one, and speaks for all."""
    registry = _registry()
    report = FailureReport(registry.rank, getattr(ending, "exit_code", FAILED), str(ending))
    return registry.rank == 0 and registry.claim(report) == report


def _failure_report(registry: RankRegistry, error: Exception, minutes: float) -> FailureReport:
    """What is said of the end, by this rank or by another one."""
    root = _root(error)
    if is_lost_peer(root):
        return _after_others(registry, root, minutes)
    if isinstance(root, ConfigError):
        # Most mistakes are seen alike by all ranks, and the first one says them.
        report = _wait_for(registry.claimed, PATIENCE) if registry.rank else None
        message = str(root) if registry.rank == 0 else f"rank {registry.rank}: {root}"
        return report or registry.claim(FailureReport(registry.rank, BAD_USAGE, message))
    message = str(root) if isinstance(root, RankError) else f"rank {registry.rank}: {describe(root)}"
    return registry.claim(FailureReport(registry.rank, FAILED, message))


def _without_registry(rank: int, error: Exception) -> FailureReport:
    """What can be said where the store is gone, too: without torchrun it lives in rank 0's process."""
    root = _root(error)
    if not is_lost_peer(root):
        return FailureReport(rank, FAILED, f"rank {rank}: {describe(root)}")
    return FailureReport(1, FAILED, "rank 0, which keeps what ranks say of their ends, ended without a word")


def _after_others(registry: RankRegistry, error: BaseException, minutes: float) -> FailureReport:
    """Another rank has gone first: its words, or what can be said without."""
    registry.sign()
    report = _wait_for(registry.claimed, PATIENCE)
    if report is not None:
        return report
    unsigned = registry.unsigned()
    ended = [rank for rank in unsigned if registry.has_ended(rank)]
    # A rank that died while this one waited for it to connect looks silent: the process is asked before the error.
    if not ended and _SILENCE.search(str(error)):
        message = f"{_names(unsigned)} did not answer within {minutes:g} minutes (--distributed-timeout-minutes)"
    else:
        message = f"{_names(ended or unsigned)} ended without a word"
    return registry.claim(FailureReport(registry.rank, FAILED, message))


def _names(ranks: Sequence[int]) -> str:
    """Ranks as the subject of a sentence."""
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}" if ranks else "a rank"


def _wait_for(look: Callable[[], FailureReport | None], seconds: float) -> FailureReport | None:
    deadline = time.monotonic() + seconds
    found = look()
    while found is None and time.monotonic() < deadline:
        time.sleep(_LOOK_AGAIN)
        found = look()
    return found


def _root(error: BaseException) -> BaseException:
    """What an error was raised for."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def is_lost_peer(error: BaseException) -> bool:
    """Whether an error says no more than that another rank is gone or silent."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and _LOST_PEER.search(str(error)) is not None
    )
