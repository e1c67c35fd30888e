"""Hints of a request on what of the prefix cache will be used again; docs/policies.md, "Hints"."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from megatron_ext.config.annotations import require_types
from megatron_ext.config.checks import require

LONGEST_SESSION = 256  # characters of an id
MAX_ENDED_SESSIONS = 64
LARGEST_TURN = 2**31 - 1
LONGEST_PAUSE = 86400.0  # seconds


@dataclass(frozen=True)
class CacheHints:
    """Hints of one request; ids of sessions are the client's own, and name sessions of the same cache salt only.

    Attributes:
        session: Id of the conversation or agent that the request belongs to: each of its prompts continues the last.
        parent_session: Id of the session that started this one; it ends with that session at the latest.
        turn: Number of the request in its session. The prompt of a higher turn replaces that of a lower one; a request
            of a turn that is no higher than the last replaces nothing (a retry, another choice).
        replaces: Id of a session, or its own, whose earlier prompt this one replaces (compaction): of that prompt only
            what both have in common will be used again.
        ends_session: Whether no request of the session comes after this one.
        ended_sessions: Ids of other sessions that have ended.
        pause_seconds: Seconds within which the session's next request is expected after this one has ended.

    Raises:
        ConfigError: A hint is invalid or contradicts another.
    """

    session: str | None = None
    parent_session: str | None = None
    turn: int | None = None
    replaces: str | None = None
    ends_session: bool = False
    ended_sessions: tuple[str, ...] = ()
    pause_seconds: float | None = None

    expected: ClassVar[str] = 'an object of hints, as in {"session": "a", "turn": 3}'

    def __post_init__(self) -> None:
        require_types(self)
        named = {"session": self.session, "parent_session": self.parent_session, "replaces": self.replaces}
        for name, value in (*named.items(), *(("ended_sessions", one) for one in self.ended_sessions)):
            require(
                value is None or 1 <= len(value) <= LONGEST_SESSION,
                f"{name} has an id of {len(value or '')} characters; 1 to {LONGEST_SESSION} would do",
            )
        count = len(self.ended_sessions)
        require(
            count <= MAX_ENDED_SESSIONS,
            f"ended_sessions has {count} ids; name at most {MAX_ENDED_SESSIONS}, and the others in the next request",
        )
        turn, pause = self.turn, self.pause_seconds
        require(turn is None or 0 <= turn <= LARGEST_TURN, f"turn {turn} must be between 0 and {LARGEST_TURN}")
        require(
            pause is None or (math.isfinite(pause) and 0 < pause <= LONGEST_PAUSE),
            f"pause_seconds {pause} must be more than 0 and at most {LONGEST_PAUSE:g}; leave it out for no pause",
        )
        for name in ("parent_session", "turn", "ends_session", "pause_seconds"):
            given = getattr(self, name)
            needless = self.session is not None or given is None or given is False
            require(needless, f"{name} {given} needs session; give the session's id or leave {name} out")
        require(
            self.parent_session is None or self.parent_session != self.session,
            f"parent_session {self.parent_session!r} is the session itself; leave it out",
        )
        require(
            pause is None or not self.ends_session,
            f"pause_seconds {pause} and ends_session contradict each other; give one of them",
        )

    @classmethod
    def of(cls, value: object) -> CacheHints:
        """Convert a JSON object.

        Raises:
            ValueError: The value is not an object of valid hints; the text follows "is not".
        """
        if isinstance(value, CacheHints):
            return value
        if not isinstance(value, Mapping):
            raise ValueError(cls.expected)
        unknown = next((name for name in value if name not in cls.__dataclass_fields__), None)
        if unknown is not None:
            known = ", ".join(cls.__dataclass_fields__)
            raise ValueError(f"known: {str(unknown)[:40]!r} is no hint; there are {known}")
        try:
            return cls(**value)
        except ValueError as error:
            raise ValueError(f"valid: {error}") from None

    @classmethod
    def parse(cls, text: str) -> CacheHints:
        """Parse command-line text: a JSON object.

        Raises:
            ValueError: The text is not a JSON object of valid hints.
        """
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            raise ValueError(cls.expected) from None
        return cls.of(value)
