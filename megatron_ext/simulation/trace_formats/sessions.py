"""Sessions of agents, in the form of kv-cache-tester's traces: a session an object, with all its requests.

    {"block_size": 64, "hash_id_scope": "local", "requests": [
        {"t": 0.0, "in": 12040, "out": 178, "hash_ids": [1, 2], "think_time": 0.0},
        {"t": 9.5, "requests": [{"t": 0.0, "in": 10792, ...}]}]}

An entry with `requests` of its own is a sub-agent. Times are in seconds: `t` from the start of the session or of the
sub-agent, `think_time` from the end of the request before. `hash_ids` are of complete blocks, the sub-agents' in the
namespace of their session. What follows the last complete block of a prompt, and every answer, is unique.

Recorded times are not replayed: a session starts by a Poisson process, and its next request comes `think_time` after
the simulated end of the one before. A sub-agent starts at its recorded distance from the request before it and runs
beside its parent, which does not wait.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ext.simulation.trace import Ids, Turn
from megatron_ext.simulation.trace_formats.block_tokens import BlockTokens
from megatron_ext.simulation.trace_formats.fields import (
    FIRST_SYNTHETIC_ID,
    JsonObject,
    count_of,
    list_of,
    objects_of,
    time_of,
)


@dataclass(frozen=True)
class SessionStarts:
    """Poisson process by which sessions start; their file does not say when.

    Attributes:
        rate: Sessions that start per second, on average.
        seed: Seed of the starts.
    """

    rate: float = 1.0
    seed: int = 0


@dataclass
class _Session:
    """Session that is being read: size and tokens of its blocks."""

    block_size: int
    tokens: BlockTokens


class SessionFormat:
    """Reader of sessions.

    Args:
        starts: Starts of sessions.
    """

    def __init__(self, starts: SessionStarts) -> None:
        self._rate, self._random = starts.rate, random.Random(starts.seed)
        self._ids = Ids(FIRST_SYNTHETIC_ID)
        self._now = 0.0
        self._threads = 0

    def read(self, line: JsonObject) -> list[Turn]:
        """Return the requests of a session and its sub-agents, each after the request that its time counts from."""
        scope = line.get("hash_id_scope", "local")
        if scope != "local":
            raise ValueError(f"hash_id_scope {str(scope)[:40]!r} is unknown; only 'local' is read")
        self._now += self._random.expovariate(self._rate)
        session = _Session(count_of(line["block_size"], "block_size"), BlockTokens(self._ids))
        return self._thread(session, objects_of(line["requests"]), self._now, None)

    def _thread(
        self, session: _Session, entries: Sequence[JsonObject], start: float, beside: Turn | None
    ) -> list[Turn]:
        """Return the requests of a session or a sub-agent, and of its sub-agents.

        Args:
            session: Session that they belong to.
            entries: Requests and sub-agents.
            start: Seconds of its start from the beginning or, given `beside`, from the start of that turn.
            beside: Turn of the parent before it; None for a session.
        """
        number, self._threads = self._threads, self._threads + 1
        turns: list[Turn] = []
        before: Turn | None = None
        before_t = 0.0
        for entry in entries:
            t = time_of(entry["t"], "t")
            if t < before_t:
                raise ValueError(f"t {t:g} must be at least the previous request's, {before_t:g}")
            if "requests" in entry:
                distance, parent = (start + t, beside) if before is None else (t - before_t, before)
                turns += self._thread(session, objects_of(entry["requests"]), distance, parent)
                continue
            length, hashes = count_of(entry["in"], "in"), list_of(entry["hash_ids"])
            pieces = session.tokens.prompt(hashes, length, session.block_size)
            answer = self._ids.take(max(1, count_of(entry["out"], "out", minimum=0)))
            if before is None:
                turn = Turn(number, start + t, pieces, answer, beside=beside)
            else:
                pause = entry.get("think_time")
                turn = Turn(number, 0.0 if pause is None else time_of(pause, "think_time"), pieces, answer, True)
            turns.append(turn)
            before, before_t = turn, t
        return turns
