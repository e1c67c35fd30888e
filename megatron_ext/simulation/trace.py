"""What is simulated: turns of sessions; their tokens in pieces, mostly ranges of ids, so that a million fit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from megatron_ext.errors import ConfigError

Pieces = tuple[Sequence[int], ...]
MAX_IDS = 2**32  # token ids are hashed as four bytes


@dataclass(frozen=True)
class Turn:
    """One request.

    Attributes:
        session: Whose; the turns of a session come one after the other.
        time: Seconds: from the beginning, or, of a reply, from the end of the session's previous turn.
        prompt: Ids of its tokens, in pieces.
        answer: Ids of the tokens that will be generated; at least one.
        is_reply: See `time`.
        salt: Of its cache keys.
    """

    session: int
    time: float
    prompt: Pieces
    answer: Sequence[int]
    is_reply: bool = False
    salt: str | None = None

    @property
    def prompt_length(self) -> int:
        """Tokens."""
        return sum(map(len, self.prompt))

    def tokens(self) -> tuple[int, ...]:
        """Of the prompt."""
        return tuple(chain.from_iterable(self.prompt))


class Ids:
    """Token ids that nobody has had yet."""

    def __init__(self, first: int = 0) -> None:
        self._next = first

    def take(self, count: int) -> range:
        """So many, in a row.

        Raises:
            ConfigError: There are none left.
        """
        self._next += count
        if self._next > MAX_IDS:
            raise ConfigError(f"the trace has more than {MAX_IDS} different tokens; fewer or shorter requests would do")
        return range(self._next - count, self._next)


def cut(pieces: Iterable[Sequence[int]], length: int) -> Pieces:
    """The first `length` tokens."""
    kept: list[Sequence[int]] = []
    for piece in pieces:
        if length <= 0:
            break
        kept.append(piece[:length])
        length -= len(piece)
    return tuple(kept)


def by_session(turns: Iterable[Turn]) -> dict[int, list[Turn]]:
    """The turns of each session, in their order."""
    sessions: dict[int, list[Turn]] = {}
    for turn in turns:
        sessions.setdefault(turn.session, []).append(turn)
    return sessions


def describe(turns: Sequence[Turn]) -> dict[str, int]:
    """Sizes of a trace."""
    return {
        "requests": len(turns),
        "sessions": len({turn.session for turn in turns}),
        "prompt_tokens": sum(turn.prompt_length for turn in turns),
        "answer_tokens": sum(len(turn.answer) for turn in turns),
    }
