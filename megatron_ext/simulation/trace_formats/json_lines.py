"""JSON objects of a trace file, one a line, each with the number of its line.

The file may be compressed (`.gz`, `.xz`). Sizes are those after decompression, and are limited, since a small file can
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

LONGEST_LINE = 2**27  # bytes, as the next one
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


def objects_of_lines(file: BinaryIO, name: str) -> Iterator[tuple[int, JsonObject]]:
    """Yield the object of each line that is not blank, with the line's number; `name` is used in errors.

    Raises:
        ConfigError: A line is too long or not an object, or the file is too large or damaged.
    """
    left, number = LONGEST_FILE, 0
    while True:
        number += 1
        raw = _read_line(file, min(left, LONGEST_LINE) + 1, f"{name}, line {number}")
        left -= len(raw)
        if not raw:
            return
        if len(raw) > LONGEST_LINE:
            raise ConfigError(f"{name}, line {number}: longer than {LONGEST_LINE} bytes; split the session")
        if left < 0:
            raise ConfigError(f"{name}, line {number}: the file has more than {LONGEST_FILE} bytes; split the file")
        if raw.strip():
            yield number, _object(raw, f"{name}, line {number}")


def _read_line(file: BinaryIO, size: int, place: str) -> bytes:
    try:
        return file.readline(size)
    except _BAD_STREAM as error:
        raise ConfigError(f"{place}: cannot be decompressed: {error}") from error
    except OSError as error:
        raise ConfigError(f"{place}: cannot be read: {error.strerror or error}") from error


def _object(raw: bytes, place: str) -> JsonObject:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place}: not JSON, an object a line: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{place}: not an object")
    return value
