"""Recorded traces: one JSON object a line, in one of three formats.

A hash may cover a block alone or a block *and* everything before it; both work in every format. A file may be
compressed (`.gz`, `.xz`). Sizes are those after decompression, and are limited, since a small file can decompress to a
large one.
"""

from __future__ import annotations

import gzip
import itertools
import json
import lzma
import random
import zlib
from array import array
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import BinaryIO, TypeVar, cast

from megatron_ext.errors import ConfigError
from megatron_ext.files import JsonObject, open_regular
from megatron_ext.simulation.trace import MAX_IDS, Ids, Pieces, Turn

FIRST_SYNTHETIC_ID = MAX_IDS // 2  # explicit token ids are below

Item = TypeVar("Item")


def list_of(value: object, kind: type[Item]) -> list[Item]:
    """Return a list of items of a type.

    Raises:
        TypeError: Not such a list.
    """
    if not isinstance(value, list) or not all(isinstance(one, kind) for one in value):
        raise TypeError(f"{str(value)[:40]!r} is not a list of {kind.__name__}")
    return value


def count_of(value: object, name: str, minimum: int = 1) -> int:
    """Return a number of tokens or blocks.

    Raises:
        ValueError: Not a whole number, less than `minimum`, or too large.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value < FIRST_SYNTHETIC_ID:
        raise ValueError(f"{name} {str(value)[:40]} must be a whole number of {minimum} or more")
    return value


def time_of(value: object, name: str = "time") -> float:
    """Return a time in the file's unit.

    Raises:
        ValueError: Not a number of zero or more.
    """
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < 1e12:
        raise ValueError(f"{name} {str(value)[:40]} must be a number of zero or more")
    return float(value)


LONGEST_LINE = 2**27  # bytes, as the next one
LONGEST_FILE = 2**32


@contextmanager
def open_trace(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file, decompressed by its suffix.

    Raises:
        ConfigError: The file cannot be read.
    """
    with open_regular(path) as file:
        if path.suffix == ".xz":
            with lzma.open(file) as plain:
                yield cast("BinaryIO", plain)
        elif path.suffix == ".gz":
            with gzip.open(file) as plain:
                yield cast("BinaryIO", plain)
        else:
            yield file


def objects_of_lines(file: BinaryIO, name: str) -> Iterator[tuple[int, JsonObject]]:
    """Yield the object of each line that is not blank, with the line's number; `name` is used in errors.

    Raises:
        ConfigError: A line is too long or not an object, or the file is too large or damaged.
    """
    left = LONGEST_FILE
    for number in itertools.count(1):
        place = f"{name}, line {number}"
        try:
            raw = file.readline(min(left, LONGEST_LINE) + 1)
        except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
            raise ConfigError(f"{place}: cannot be read or decompressed: {error}") from error
        left -= len(raw)
        if not raw:
            return
        if len(raw) > LONGEST_LINE:
            raise ConfigError(f"{place}: longer than {LONGEST_LINE} bytes; split the session")
        if left < 0:
            raise ConfigError(f"{place}: the file has more than {LONGEST_FILE} bytes; split the file")
        if raw.strip():
            yield number, _object(raw, place)


def _object(raw: bytes, place: str) -> JsonObject:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place}: not JSON, an object a line: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{place}: not an object")
    return value


class BlockTokens:
    """Tokens of the hashes of one namespace.

    Args:
        ids: Source of token ids, which all namespaces of a trace share.
    """

    def __init__(self, ids: Ids) -> None:
        self._ids = ids
        self._blocks: dict[Hashable, range] = {}

    def prompt(self, hashes: Sequence[Hashable], length: int, block_size: int) -> Pieces:
        """Return `length` tokens: the blocks' tokens, the last block cut, and unique tokens after them."""
        found: list[range] = []
        for one in hashes:
            if length <= 0:
                break
            block = self._blocks.get((block_size, one))
            if block is None:
                block = self._blocks[block_size, one] = self._ids.take(block_size)
            _append(found, block[:length])
            length -= block_size
        if length > 0:
            _append(found, self._ids.take(length))
        return tuple(found)


def _append(pieces: list[range], piece: range) -> None:
    """Append tokens; a piece that continues the last one is merged with it."""
    if pieces and pieces[-1].stop == piece.start:
        pieces[-1] = range(pieces[-1].start, piece.stop)
    else:
        pieces.append(piece)


BLOCK_SIZE = 512  # tokens of Mooncake's blocks, unless a line has a `block_size`
_FIELDS = {"time", "session", "reply", "tokens", "block_hashes", "block_size", "length", "answer", "answer_length"}
_FIELDS |= {"salt", "answer_hashed"}


class TraceReader:
    """Reader of the objects of a trace. Errors are `KeyError`, `TypeError` and `ValueError`, and name the field.

    Args:
        rate: Sessions of agents that start per second, on average.
    """

    def __init__(self, rate: float) -> None:
        self._rate, self._random = rate, random.Random(0)
        self._ids = Ids(FIRST_SYNTHETIC_ID)
        self._blocks = BlockTokens(self._ids)  # not of agents' sessions
        self._sessions: dict[object, int] = {}  # by the names of this package's format
        self._numbers = itertools.count()  # of sessions
        self._now = 0.0

    def read(self, line: JsonObject) -> list[Turn]:
        """Return the requests of an object, each after the request that its time counts from."""
        if "requests" in line:
            return self._session(line)
        return [self._mooncake(line) if "hash_ids" in line else self._request(line)]

    def _unique(self, length: object, name: str) -> range:
        """Return unique tokens for an answer, at least one."""
        return self._ids.take(max(1, count_of(length, name, minimum=0)))

    # Mooncake's

    def _mooncake(self, line: JsonObject) -> Turn:
        """Return a request of Mooncake's traces (FAST 25), with hashes of blocks of 512 tokens that all share.

            {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}

        `timestamp` is in milliseconds. Every request is a session of its own.
        """
        size = count_of(line.get("block_size", BLOCK_SIZE), "block_size")
        length = count_of(line["input_length"], "input_length")
        prompt = self._blocks.prompt(list_of(line["hash_ids"], int), length, size)
        time = time_of(line["timestamp"], "timestamp") / 1000
        return Turn(next(self._numbers), time, prompt, self._unique(line["output_length"], "output_length"))

    # This package's

    def _request(self, line: JsonObject) -> Turn:
        """Return a request of this package's format, with token ids or block hashes.

            {"time": 0.5, "session": "a", "tokens": [1, 2, 3], "answer": [4, 5]}
            {"time": 2.0, "session": "a", "reply": true, "block_hashes": ["x", "y"], "block_size": 512, "length": 700,
             "answer_length": 40, "salt": "tenant"}

        With `answer_hashed` the hashes cover the answer after the prompt, as in a server's `/prefix_cache/trace`.
        `time` is in seconds from the beginning; with `reply`, from the end of the session's previous request.
        """
        unknown = sorted(set(line) - _FIELDS)
        if unknown:
            raise ValueError(f"unknown field {unknown[0]!r}; known are {', '.join(sorted(_FIELDS))}")
        name, is_reply, salt = line.get("session"), line.get("reply", False) is True, line.get("salt")
        if is_reply and name not in self._sessions:
            raise ValueError("reply in a session without an earlier request")
        number = next(self._numbers)
        session = number if name is None else self._sessions.setdefault(name, number)
        prompt, answer = self._prompt_and_answer(line)
        return Turn(session, time_of(line["time"]), prompt, answer, is_reply, None if salt is None else str(salt))

    def _prompt_and_answer(self, line: JsonObject) -> tuple[Pieces, Sequence[int]]:
        if ("tokens" in line) == ("block_hashes" in line):
            raise ValueError("a request needs either tokens or block_hashes, and not both")
        if line.get("answer_hashed", False) is True:
            length, answer = count_of(line["length"], "length"), count_of(line["answer_length"], "answer_length")
            both = array("I", chain.from_iterable(self._hashed(line, answer)))
            return (both[:length],), both[length:]
        prompt = (_tokens(line["tokens"]),) if "tokens" in line else self._hashed(line)
        if "answer" in line:
            return prompt, _tokens(line["answer"])
        return prompt, self._unique(line.get("answer_length", 1), "answer_length")

    def _hashed(self, line: JsonObject, answer: int = 0) -> Pieces:
        """Return the tokens of the prompt's hashes, and of `answer` tokens after it."""
        hashes, size = list_of(line["block_hashes"], object), count_of(line["block_size"], "block_size")
        length = count_of(line.get("length", len(hashes) * size), "length")
        return self._blocks.prompt(hashes, length + answer, size)

    # Sessions of agents

    def _session(self, line: JsonObject) -> list[Turn]:
        """Return the requests of a session of an agent and its sub-agents, as in kv-cache-tester's traces.

            {"block_size": 64, "hash_id_scope": "local", "requests": [
                {"t": 0.0, "in": 12040, "out": 178, "hash_ids": [1, 2], "think_time": 0.0},
                {"t": 9.5, "requests": [{"t": 0.0, "in": 10792, ...}]}]}

        An entry with `requests` of its own is a sub-agent. Times are in seconds: `t` from the start of the session or
        of the sub-agent, `think_time` from the end of the request before. `hash_ids` are of complete blocks, the
        sub-agents' in the namespace of their session. What follows the last complete block of a prompt, and every
        answer, is unique.

        Recorded times are not replayed: a session starts by a Poisson process, and its next request comes `think_time`
        after the simulated end of the one before. A sub-agent starts at its recorded distance from the request before
        it and runs beside its parent, which does not wait.
        """
        scope = line.get("hash_id_scope", "local")
        if scope != "local":
            raise ValueError(f"hash_id_scope {str(scope)[:40]!r} is unknown; only 'local' is read")
        self._now += self._random.expovariate(self._rate)
        size = count_of(line["block_size"], "block_size")
        return self._thread(BlockTokens(self._ids), size, list_of(line["requests"], dict), self._now, None)

    def _thread(
        self, blocks: BlockTokens, size: int, entries: Sequence[JsonObject], start: float, beside: Turn | None
    ) -> list[Turn]:
        """Return the requests of a session or a sub-agent, and of its sub-agents.

        Args:
            blocks: Tokens of the session's hashes.
            size: Tokens of a block.
            entries: Requests and sub-agents.
            start: Seconds of its start from the beginning or, given `beside`, from the start of that turn.
            beside: Turn of the parent before it; None for a session.
        """
        number = next(self._numbers)
        turns: list[Turn] = []
        before: Turn | None = None
        before_t = 0.0
        for entry in entries:
            t = time_of(entry["t"], "t")
            if t < before_t:
                raise ValueError(f"t {t:g} must be at least the previous request's, {before_t:g}")
            if "requests" in entry:
                distance, parent = (start + t, beside) if before is None else (t - before_t, before)
                turns += self._thread(blocks, size, list_of(entry["requests"], dict), distance, parent)
                continue
            length, hashes = count_of(entry["in"], "in"), list_of(entry["hash_ids"], int)
            prompt = blocks.prompt(hashes, length, size)
            answer = self._unique(entry["out"], "out")
            if before is None:
                turn = Turn(number, start + t, prompt, answer, beside=beside)
            else:
                pause = entry.get("think_time")
                turn = Turn(number, 0.0 if pause is None else time_of(pause, "think_time"), prompt, answer, True)
            turns.append(turn)
            before, before_t = turn, t
        return turns


def _tokens(value: object) -> Sequence[int]:
    tokens = array("I", list_of(value, int))
    if not tokens:
        raise ValueError("a list of tokens is empty")
    if max(tokens) >= FIRST_SYNTHETIC_ID:
        raise ValueError(f"token {max(tokens)} must be below {FIRST_SYNTHETIC_ID}")
    return tokens


def read_trace(path: Path, max_requests: int | None = None, rate: float = 1.0) -> list[Turn]:
    """Return the first `max_requests` requests of a file of JSON lines, which may be compressed.

    Args:
        path: File of any format.
        max_requests: Maximum number of requests; None for all.
        rate: Sessions that start per second, on average, in a file that holds sessions.

    Raises:
        ConfigError: The file cannot be read, or an object is invalid; one line, with the number of the object's line.
    """
    with open_trace(path) as file:
        return read_requests(file, str(path), max_requests, rate)


def read_requests(file: BinaryIO, name: str, max_requests: int | None = None, rate: float = 1.0) -> list[Turn]:
    """Return the first `max_requests` requests of open JSON lines, as `read_trace`; `name` is used in errors."""
    reader = TraceReader(rate)
    turns: list[Turn] = []
    for number, line in objects_of_lines(file, name):
        try:
            turns += reader.read(line)
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise ConfigError(f"{name}, line {number}: {what}") from error
        if max_requests is not None and len(turns) >= max_requests:
            break
    if not turns:
        raise ConfigError(f"{name} has no request")
    return turns[:max_requests]
