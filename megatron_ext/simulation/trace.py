"""Traces: turns of sessions, with tokens in pieces, mostly ranges of ids, so that a million turns fit in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from megatron_ext.errors import ConfigError

Pieces = tuple[Sequence[int], ...]
MAX_IDS = 2**32  # token ids are hashed as four bytes


@dataclass(frozen=True)
class Turn:
    """One request.

    Attributes:
        session: Session of the turn; turns of a session follow each other.
        time: Seconds from the beginning; for a reply, from the end of the session's previous turn; for the first turn
            of a sub-agent, from the start of the turn `beside`.
        prompt: Ids of the prompt's tokens, in pieces.
        answer: Ids of the tokens that will be generated; at least one.
        is_reply: See `time`.
        salt: Salt of its cache keys.
        beside: Turn of another session that this one was started by, and which does not wait for it; None for others.
    """

    session: int
    time: float
    prompt: Pieces
    answer: Sequence[int]
    is_reply: bool = False
    salt: str | None = None
    beside: Turn | None = None

    @property
    def prompt_length(self) -> int:
        """Number of prompt tokens."""
        return sum(map(len, self.prompt))

    def tokens(self) -> tuple[int, ...]:
        """Return the prompt's tokens."""
        return tuple(chain.from_iterable(self.prompt))


def common_tokens(one: Pieces, other: Pieces) -> int:
    """Return a number of tokens at the start that two prompts have in common; pieces that are no ranges count whole.

    Takes time for the common pieces, not for their tokens.
    """
    common = 0
    for mine, its in zip(one, other, strict=False):
        if mine == its:
            common += len(mine)
            continue
        if isinstance(mine, range) and isinstance(its, range) and mine[:1] == its[:1]:
            common += min(len(mine), len(its))
        break
    return common


class Ids:
    """Source of unused token ids."""

    def __init__(self, first: int = 0) -> None:
        self._next = first

    def take(self, count: int) -> range:
        """Return `count` consecutive unused ids.

        Raises:
            ConfigError: The ids are exhausted.
        """
        self._next += count
        if self._next > MAX_IDS:
            raise ConfigError(f"the trace has more than {MAX_IDS} different tokens; give fewer or shorter requests")
        return range(self._next - count, self._next)


def describe(turns: Sequence[Turn]) -> dict[str, int]:
    """Return the sizes of a trace."""
    return {
        "requests": len(turns),
        "sessions": len({turn.session for turn in turns}) - sum(turn.beside is not None for turn in turns),
        "sub_agents": sum(turn.beside is not None for turn in turns),
        "prompt_tokens": sum(turn.prompt_length for turn in turns),
        "answer_tokens": sum(len(turn.answer) for turn in turns),
    }
