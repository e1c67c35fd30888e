"""Trace format of this package: token ids, or block hashes, of one request a line.

    {"time": 0.5, "session": "a", "tokens": [1, 2, 3], "answer": [4, 5]}
    {"time": 2.0, "session": "a", "reply": true, "block_hashes": ["x", "y"], "block_size": 512, "length": 700,
     "answer_length": 40, "salt": "tenant"}

With `answer_hashed` the hashes cover the answer after the prompt, as in a server's `/prefix_cache/trace`.

`time` is in seconds from the beginning; with `reply`, from the end of the session's previous request.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from itertools import chain, islice

from megatron_ext.simulation.trace import Ids, Pieces, Turn, cut
from megatron_ext.simulation.trace_formats.block_tokens import BlockTokens
from megatron_ext.simulation.trace_formats.fields import FIRST_SYNTHETIC_ID, JsonObject, count_of, list_of, time_of

_FIELDS = {"time", "session", "reply", "tokens", "block_hashes", "block_size", "length", "answer", "answer_length"}
_FIELDS |= {"salt", "answer_hashed"}


class OwnFormat:
    """Reader of this package's format."""

    def __init__(self) -> None:
        self._blocks = BlockTokens(Ids(FIRST_SYNTHETIC_ID))
        self._sessions: dict[object, int] = {}
        self._read = 0

    def read(self, line: JsonObject) -> list[Turn]:
        """Return the request of a line."""
        unknown = sorted(set(line) - _FIELDS)
        if unknown:
            raise ValueError(f"unknown field {unknown[0]!r}; known are {', '.join(sorted(_FIELDS))}")
        name = line.get("session", ("alone", self._read))
        if not isinstance(name, Hashable):
            raise TypeError("session must be a text or a number")
        self._read += 1
        is_new = name not in self._sessions
        session = self._sessions.setdefault(name, len(self._sessions))
        is_reply = line.get("reply", False) is True
        if is_reply and is_new:
            raise ValueError("reply in a session without an earlier request")
        salt = line.get("salt")
        prompt, answer = self._prompt_and_answer(line)
        return [Turn(session, time_of(line["time"]), prompt, answer, is_reply, None if salt is None else str(salt))]

    def _prompt_and_answer(self, line: JsonObject) -> tuple[Pieces, Sequence[int]]:
        if line.get("answer_hashed", False) is not True:
            return self._prompt(line), self._answer(line)
        length, answer = count_of(line["length"], "length"), count_of(line["answer_length"], "answer_length")
        size = count_of(line["block_size"], "block_size")
        both = self._blocks.prompt(list_of(line["block_hashes"]), length + answer, size)
        return cut(both, length), list(islice(chain.from_iterable(both), length, None))

    def _prompt(self, line: JsonObject) -> Pieces:
        if ("tokens" in line) == ("block_hashes" in line):
            raise ValueError("a request needs either tokens or block_hashes, and not both")
        if "tokens" in line:
            return (_tokens(line["tokens"]),)
        hashes, size = list_of(line["block_hashes"]), count_of(line["block_size"], "block_size")
        length = count_of(line.get("length", len(hashes) * size), "length")
        return self._blocks.prompt(hashes, length, size)

    def _answer(self, line: JsonObject) -> Sequence[int]:
        if "answer" in line:
            return _tokens(line["answer"])
        return self._blocks.ids.take(count_of(line.get("answer_length", 1), "answer_length"))


def _tokens(value: object) -> Sequence[int]:
    tokens = array("I", list_of(value))
    if not tokens:
        raise ValueError("a list of tokens is empty")
    if max(tokens) >= FIRST_SYNTHETIC_ID:
        raise ValueError(f"token {max(tokens)} must be below {FIRST_SYNTHETIC_ID}")
    return tokens
