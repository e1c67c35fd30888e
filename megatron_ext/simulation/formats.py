"""Formats of recorded traces: JSON lines of this package, with tokens or block hashes, and Mooncake's traces.

This package's format, a line a request:

    {"time": 0.5, "session": "a", "tokens": [1, 2, 3], "answer": [4, 5]}
    {"time": 2.0, "session": "a", "reply": true, "block_hashes": ["x", "y"], "block_size": 512, "length": 700,
     "answer_length": 40, "salt": "tenant"}

With `answer_hashed` the hashes cover the answer after the prompt, as in a server's `/prefix_cache/trace`.

`time` is in seconds from the beginning; with `reply`, from the end of the session's previous request.
A hash may cover a block alone or a block *and* everything before it; both work here.

Mooncake's format: `timestamp` in milliseconds, `input_length`, `output_length`, `hash_ids` of blocks of 512 tokens.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import BinaryIO

from megatron_ext.errors import ConfigError
from megatron_ext.files import open_regular
from megatron_ext.simulation.trace import MAX_IDS, Ids, Pieces, Turn, cut

MOONCAKE_BLOCK = 512  # tokens
LONGEST_LINE = 2**24  # bytes
_FIRST_OWN_ID = MAX_IDS // 2  # explicit token ids are below
_OUR_FIELDS = {"time", "session", "reply", "tokens", "block_hashes", "block_size", "length", "answer", "answer_length"}
_OUR_FIELDS |= {"salt", "answer_hashed"}

Line = Mapping[str, object]


class _Blocks:
    """Synthetic tokens of hashes: equal hashes have equal tokens."""

    def __init__(self) -> None:
        self.ids = Ids(_FIRST_OWN_ID)
        self._blocks: dict[Hashable, range] = {}

    def prompt(self, hashes: Sequence[Hashable], length: int, block_size: int) -> Pieces:
        """Return `length` tokens: those of the blocks, the last block cut, and unique ones after them."""
        pieces: list[range] = []
        left = length
        for one in hashes:
            if left <= 0:
                break
            block = self._blocks.setdefault((block_size, one), range(0))
            if not block:
                block = self._blocks[block_size, one] = self.ids.take(block_size)
            pieces.append(block[: min(left, block_size)])
            left -= block_size
        return (*pieces, self.ids.take(left)) if left > 0 else tuple(pieces)


def read_trace(path: Path, max_requests: int | None = None) -> list[Turn]:
    """Return the first `max_requests` requests of a file, whose first line determines the format.

    Raises:
        ConfigError: The file cannot be read, or a line is invalid.
    """
    with open_regular(path) as file:
        return read_requests(file, str(path), max_requests)


def read_requests(file: BinaryIO, name: str, max_requests: int | None = None) -> list[Turn]:
    """Return the first `max_requests` requests of an open file, as `read_trace`; `name` is used in errors."""
    read: Callable[[Line, int], Turn] | None = None
    turns: list[Turn] = []
    for number, line in islice(_lines(file, name), max_requests):
        where = f"{name}, line {number}"
        if read is None:
            read = _Mooncake().read if "hash_ids" in line else _Ours().read
        try:
            turns.append(read(line, len(turns)))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise ConfigError(f"{where}: {what}") from error
    if not turns:
        raise ConfigError(f"{name} has no request")
    return turns


def _lines(file: BinaryIO, name: str) -> Iterator[tuple[int, Line]]:
    for number in range(1, MAX_IDS):
        raw = file.readline(LONGEST_LINE + 1)
        if not raw:
            return
        if len(raw) > LONGEST_LINE:
            raise ConfigError(f"{name}, line {number}: longer than {LONGEST_LINE} bytes")
        if not raw.strip():
            continue
        try:
            line = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{name}, line {number}: not JSON: {error}") from error
        if not isinstance(line, dict):
            raise ConfigError(f"{name}, line {number}: not an object")
        yield number, line


class _Mooncake:
    def __init__(self) -> None:
        self._blocks = _Blocks()

    def read(self, line: Line, place: int) -> Turn:
        prompt = self._blocks.prompt(
            _list(line["hash_ids"]), _count(line["input_length"], "input_length"), MOONCAKE_BLOCK
        )
        answer = self._blocks.ids.take(max(1, _count(line["output_length"], "output_length", minimum=0)))
        return Turn(place, _seconds(line["timestamp"]) / 1000, prompt, answer)


class _Ours:
    def __init__(self) -> None:
        self._blocks = _Blocks()
        self._sessions: dict[object, int] = {}

    def read(self, line: Line, place: int) -> Turn:
        unknown = sorted(set(line) - _OUR_FIELDS)
        if unknown:
            raise ValueError(f"unknown field {unknown[0]!r}; known are {', '.join(sorted(_OUR_FIELDS))}")
        name = line.get("session", ("alone", place))
        if not isinstance(name, Hashable):
            raise TypeError("session must be a text or a number")
        is_new = name not in self._sessions
        session = self._sessions.setdefault(name, len(self._sessions))
        is_reply = line.get("reply", False) is True
        if is_reply and is_new:
            raise ValueError("reply in a session without an earlier request")
        salt = line.get("salt")
        prompt, answer = self._prompt_and_answer(line)
        return Turn(
            session,
            _seconds(line["time"]),
            prompt,
            answer,
            is_reply,
            None if salt is None else str(salt),
        )

    def _prompt_and_answer(self, line: Line) -> tuple[Pieces, Sequence[int]]:
        if line.get("answer_hashed", False) is not True:
            return self._prompt(line), self._answer(line)
        length, answer = _count(line["length"], "length"), _count(line["answer_length"], "answer_length")
        both = self._blocks.prompt(
            _list(line["block_hashes"]), length + answer, _count(line["block_size"], "block_size")
        )
        return cut(both, length), list(islice(chain.from_iterable(both), length, None))

    def _prompt(self, line: Line) -> Pieces:
        if ("tokens" in line) == ("block_hashes" in line):
            raise ValueError("a request needs either tokens or block_hashes, and not both")
        if "tokens" in line:
            return (_tokens(line["tokens"]),)
        hashes, size = _list(line["block_hashes"]), _count(line["block_size"], "block_size")
        length = _count(line.get("length", len(hashes) * size), "length")
        return self._blocks.prompt(hashes, length, size)

    def _answer(self, line: Line) -> Sequence[int]:
        if "answer" in line:
            return _tokens(line["answer"])
        return self._blocks.ids.take(_count(line.get("answer_length", 1), "answer_length"))


def _tokens(value: object) -> Sequence[int]:
    tokens = array("I", _list(value))
    if not tokens:
        raise ValueError("a list of tokens is empty")
    if max(tokens) >= _FIRST_OWN_ID:
        raise ValueError(f"token {max(tokens)} is too large; ids below {_FIRST_OWN_ID} would do")
    return tokens


def _list(value: object) -> list[int]:
    if not isinstance(value, list):
        raise TypeError(f"{str(value)[:40]!r} is not a list")
    return value


def _count(value: object, name: str, minimum: int = 1) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value < _FIRST_OWN_ID:
        raise ValueError(f"{name} {str(value)[:40]} must be a whole number of {minimum} or more")
    return value


def _seconds(value: object) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < 1e12:
        raise ValueError(f"time {str(value)[:40]} must be a number of zero or more")
    return float(value)
