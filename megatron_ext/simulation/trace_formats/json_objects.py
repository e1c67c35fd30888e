"""JSON objects of a trace file, one after the other, each with the number of its first line.

`.jsonl` has an object a line. `.json` is one document: an object, a list of objects, or objects after each other. Both
may be compressed (`.gz`, `.xz`). Sizes are those after decompression, and are limited, since a small file can
decompress to a large one.
"""

from __future__ import annotations

import gzip
import json
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from megatron_ext.errors import ConfigError
from megatron_ext.files import open_regular
from megatron_ext.simulation.trace_formats.fields import JsonObject

LONGEST_LINE = 2**27  # bytes, as the next two
LONGEST_DOCUMENT = 2**28
LONGEST_FILE = 2**32
_BAD_STREAM = (lzma.LZMAError, gzip.BadGzipFile, zlib.error, EOFError)


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


def is_document(path: Path) -> bool:
    """Return whether a file is a JSON document, by its name."""
    names = [path.suffix for path in (path, path.with_suffix(""))]
    return names[0] == ".json" or (names[0] in (".gz", ".xz") and names[1] == ".json")


def objects_of_lines(file: BinaryIO, name: str) -> Iterator[tuple[int, JsonObject]]:
    """Yield the object of each line that is not blank, with the line's number; `name` is used in errors.

    Raises:
        ConfigError: A line is too long or not an object, or the file is too large or damaged.
    """
    left, number = LONGEST_FILE, 0
    while True:
        number += 1
        raw = _read(file.readline, min(left, LONGEST_LINE) + 1, name, number)
        left -= len(raw)
        if not raw:
            return
        if len(raw) > LONGEST_LINE:
            raise ConfigError(f"{name}, line {number}: longer than {LONGEST_LINE} bytes; split the session")
        if left < 0:
            raise ConfigError(f"{name}, line {number}: the file has more than {LONGEST_FILE} bytes; split the file")
        if raw.strip():
            try:
                value = json.loads(raw)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{name}, line {number}: not JSON: {error}") from error
            yield number, _object(value, name, number)


def objects_of_document(file: BinaryIO, name: str) -> Iterator[tuple[int, JsonObject]]:
    """Yield the objects of a JSON document, each with the number of its first line; see `objects_of_lines`."""
    raw = _read(file.read, LONGEST_DOCUMENT + 1, name, 1)
    if len(raw) > LONGEST_DOCUMENT:
        raise ConfigError(f"{name}, line 1: longer than {LONGEST_DOCUMENT} bytes; write a .jsonl, an object a line")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{name}, line {line}: not a text in UTF-8") from error
    del raw
    return _objects_of_text(text, name)


def _objects_of_text(text: str, name: str) -> Iterator[tuple[int, JsonObject]]:
    decode, start, number = json.JSONDecoder().raw_decode, _skip_blanks(text, 0), 1
    is_list = text.startswith("[", start)
    end, position = _skip_blanks(text, start + is_list), 0
    while end < len(text) and not (is_list and text[end] == "]"):
        number, position = number + text.count("\n", position, end), end
        try:
            value, end = decode(text, position)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{name}, line {error.lineno}: not JSON: {error.msg}") from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{name}, line {number}: not JSON: {error}") from error
        yield number, _object(value, name, number)
        end = _skip_blanks(text, end)
        if is_list and text.startswith(",", end):
            end = _skip_blanks(text, end + 1)
        elif is_list and not text.startswith("]", end):
            number += text.count("\n", position, end)
            raise ConfigError(f"{name}, line {number}: not JSON: a list that does not go on or end")
    if is_list and _skip_blanks(text, end + 1) < len(text):
        number += text.count("\n", position, _skip_blanks(text, end + 1))
        raise ConfigError(f"{name}, line {number}: not JSON: more after the end of the list")


def _read(read, size: int, name: str, number: int) -> bytes:  # type: ignore[no-untyped-def]  # a method of a file
    try:
        return cast("bytes", read(size))
    except _BAD_STREAM as error:
        raise ConfigError(f"{name}, line {number}: cannot be decompressed: {error}") from error
    except OSError as error:
        raise ConfigError(f"{name}, line {number}: cannot be read: {error.strerror or error}") from error


def _object(value: object, name: str, number: int) -> JsonObject:
    if not isinstance(value, dict):
        raise ConfigError(f"{name}, line {number}: not an object")
    return value


def _skip_blanks(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\r\n":
        position += 1
    return position
