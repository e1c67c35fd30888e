"""Reading a small file that somebody else wrote: a regular one, of a size that is stated, and no more than that."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import BinaryIO

from megatron_ext.errors import CheckpointError, ConfigError

JsonObject = dict[str, object]  # as it was read: what a value is must still be found out

_LONGEST_JSON = 16 * 1024**2  # bytes, of a configuration, or a tokenizer's
_MAX_LEVELS = 32  # of lists and objects in one another

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def read_bytes(path: str | Path, limit: int, error: type[ConfigError] = ConfigError) -> bytes:
    """The bytes of a regular file; otherwise as `read_text`."""
    with open_regular(path, error) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(limit + 1) if size <= limit else b""
    if size > limit or len(content) > limit:  # it may have grown; those of /proc say that they are empty
        raise error(f"{path}: {max(size, len(content))} bytes or more; such a file may have {limit}")
    return content


def read_text(path: str | Path, limit: int, error: type[ConfigError] = ConfigError) -> str:
    """The text of a regular file in UTF-8; links are followed, and must end in one.

    Nothing is opened that could block or answer for ever, and at most `limit` bytes are kept.

    Args:
        path: The file.
        limit: The most bytes that it may have.
        error: What to raise.

    Raises:
        ConfigError: It is not there, not a regular file, larger than `limit`, or not UTF-8; as `error`, in one line.
    """
    try:
        return read_bytes(path, limit, error).decode("utf-8")
    except UnicodeDecodeError:
        raise error(f"{path}: not a text file in UTF-8") from None


def open_regular(path: str | Path, error: type[ConfigError] = ConfigError) -> BinaryIO:
    """A regular file of any size, open for reading; otherwise as `read_text`."""
    try:
        _require_regular(path, os.stat(path), error)  # opening a device may do something already
        # Between the two calls it may have become a pipe, whose opening would wait for a writer.
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as problem:
        raise error(f"{path}: {problem.strerror or problem}") from None
    try:
        _require_regular(path, os.fstat(handle), error)
    except error:
        os.close(handle)
        raise
    return os.fdopen(handle, "rb")


def _require_regular(path: str | Path, status: os.stat_result, error: type[ConfigError]) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise error(f"{path}: {kind}; only a regular file is read")


def read_json(path: Path, limit: int = _LONGEST_JSON) -> JsonObject:
    """A JSON file that holds one object.

    Args:
        path: The file; a link is followed, and must end in a regular file.
        limit: The most bytes that it may have.

    Raises:
        CheckpointError: It is not there, not such a file, not JSON, or too much of it.
    """
    if not os.path.lexists(path):
        raise CheckpointError(f"{path.parent} has no {path.name}")
    text = read_text(path, limit, CheckpointError)
    try:
        content = json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except RecursionError as error:
        raise CheckpointError(_too_deep(path)) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    _require_shallow(content, path)
    return content


def _require_shallow(content: JsonObject, path: Path) -> None:
    """What is read next may call itself for each level."""
    level: list[object] = [content]
    for _ in range(_MAX_LEVELS):
        lists = [value for value in level if isinstance(value, list)]
        objects = [value.values() for value in level if isinstance(value, dict)]
        level = [inner for values in (*lists, *objects) for inner in values]
    if level:
        raise CheckpointError(_too_deep(path))


def _too_deep(path: Path) -> str:
    return f"{path} cannot be read: its lists and objects are nested more than {_MAX_LEVELS} deep"
