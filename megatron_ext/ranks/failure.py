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
from megatron_ext.interruption import Interrupted

FAILED, BAD_USAGE = 1, 2  # exit codes
PATIENCE = 3.0  # seconds that somebody else has to say what has happened
_LOOK_AGAIN = 0.05  # seconds
_SILENCE = re.compile(r"[Tt]imed out|Wait timeout")
_LOST_PEER = re.compile(rf"gloo.transport|NCCL|Connection (reset|closed|refused)|Broken pipe|{_SILENCE.pattern}")


@dataclass(frozen=True)
class LastWords:
    """What one rank says for all."""

    rank: int
    exit_code: int
    message: str


class Board:
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

    def claim(self, words: LastWords) -> LastWords:
        """Speak for all, unless somebody does already: the words that count."""
        mine = json.dumps(asdict(words))
        return LastWords(**json.loads(self._store.compare_set("last words", "", mine)))

    def claimed(self) -> LastWords | None:
        """What has been said."""
        if not self._store.check(["last words"]):
            return None
        return LastWords(**json.loads(self._store.get("last words")))

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
        _board().sign_in()


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
        board = _board()
        try:
            words = _last_words(board, error, minutes)
        except dist.DistError:
            words = _without_board(board.rank, error)
        raise RankError(words.message if words.rank == board.rank else "", exit_code=words.exit_code) from error


def _is_alone() -> bool:
    return not dist.is_initialized() or dist.get_world_size() == 1


def _board() -> Board:
    everybody = dist.group.WORLD
    assert everybody is not None, "torch.distributed has been started"
    return Board(everybody.get_group_store(), dist.get_rank(), dist.get_world_size())


def _may_say(ending: BaseException) -> bool:
    """Whether it is for this rank to say that it was asked to end: it is the first one, and speaks for all."""
    board = _board()
    words = LastWords(board.rank, getattr(ending, "exit_code", FAILED), str(ending))
    return board.rank == 0 and board.claim(words) == words


def _last_words(board: Board, error: Exception, minutes: float) -> LastWords:
    """What is said of the end, by this rank or by another one."""
    root = _root(error)
    if is_lost_peer(root):
        return _after_others(board, root, minutes)
    if isinstance(root, ConfigError):
        # Most mistakes are seen alike by all ranks, and the first one says them.
        words = _wait_for(board.claimed, PATIENCE) if board.rank else None
        message = str(root) if board.rank == 0 else f"rank {board.rank}: {root}"
        return words or board.claim(LastWords(board.rank, BAD_USAGE, message))
    message = str(root) if isinstance(root, RankError) else f"rank {board.rank}: {describe(root)}"
    return board.claim(LastWords(board.rank, FAILED, message))


def _without_board(rank: int, error: Exception) -> LastWords:
    """What can be said where the store is gone, too: without torchrun it lives in rank 0's process."""
    root = _root(error)
    if not is_lost_peer(root):
        return LastWords(rank, FAILED, f"rank {rank}: {describe(root)}")
    return LastWords(1, FAILED, "rank 0, which keeps what ranks say of their ends, ended without a word")


def _after_others(board: Board, error: BaseException, minutes: float) -> LastWords:
    """Another rank has gone first: its words, or what can be said without."""
    board.sign()
    words = _wait_for(board.claimed, PATIENCE)
    if words is not None:
        return words
    unsigned = board.unsigned()
    ended = [rank for rank in unsigned if board.has_ended(rank)]
    # A rank that died while this one waited for it to connect looks silent: the process is asked before the error.
    if not ended and _SILENCE.search(str(error)):
        message = f"{_names(unsigned)} did not answer within {minutes:g} minutes (--distributed-timeout-minutes)"
    else:
        message = f"{_names(ended or unsigned)} ended without a word"
    return board.claim(LastWords(board.rank, FAILED, message))


def _names(ranks: Sequence[int]) -> str:
    """Ranks as the subject of a sentence."""
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}" if ranks else "a rank"


def _wait_for(look: Callable[[], LastWords | None], seconds: float) -> LastWords | None:
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
