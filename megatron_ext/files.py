"""Safe reading of small files from other sources: regular files only, up to a given size."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import BinaryIO

from megatron_ext.errors import CheckpointError, ConfigError

JsonObject = dict[str, object]  # as parsed: the types of the values are unchecked

_LONGEST_JSON = 16 * 1024**2  # bytes, of a configuration, or a tokenizer's
_MAX_LEVELS = 32  # nesting of lists and objects

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def read_bytes(path: str | Path, limit: int, error: type[ConfigError] = ConfigError) -> bytes:
    """Return the bytes of a regular file; otherwise as `read_text`."""
    with open_regular(path, error) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(limit + 1) if size <= limit else b""
    if size > limit or len(content) > limit:  # it may have grown; files in /proc report size 0
        raise error(f"{path}: {max(size, len(content))} bytes or more; such a file must have at most {limit}")
    return content


def read_text(path: str | Path, limit: int, error: type[ConfigError] = ConfigError) -> str:
    """Return the UTF-8 text of a regular file; links are followed, and must end in a regular file.

    No file is opened that could block or be endless, and at most `limit` bytes are kept.

    Args:
        path: The file.
        limit: Maximum size in bytes.
        error: Exception class to raise.

    Raises:
        ConfigError: The file is missing, not regular, larger than `limit`, or not UTF-8; as `error`, in one line.
    """
    try:
        return read_bytes(path, limit, error).decode("utf-8")
    except UnicodeDecodeError:
        raise error(f"{path}: not a text file in UTF-8") from None


def open_regular(path: str | Path, error: type[ConfigError] = ConfigError) -> BinaryIO:
    """Open a regular file of any size for reading; otherwise as `read_text`."""
    try:
        _require_regular(path, os.stat(path), error)  # opening a device may have side effects
        # The path may have become a pipe between the two calls; opening a pipe would wait for a writer.
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
        raise error(f"{path}: {kind_of(status.st_mode)}; only a regular file is read")


def kind_of(mode: int) -> str:
    """Return the kind of a file that is not regular, in words."""
    return _KINDS.get(stat.S_IFMT(mode), "something else")


def read_json(path: Path, limit: int = _LONGEST_JSON) -> JsonObject:
    """Return the object of a JSON file.

    Args:
        path: The file; a link is followed, and must end in a regular file.
        limit: Maximum size in bytes.

    Raises:
        CheckpointError: The file is missing, not regular, not a JSON object, or too large or too deep.
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
    """Check the nesting depth: later readers may recurse once per level."""
    level: list[object] = [content]
    for _ in range(_MAX_LEVELS):
        lists = [value for value in level if isinstance(value, list)]
        objects = [value.values() for value in level if isinstance(value, dict)]
        level = [inner for values in (*lists, *objects) for inner in values]
    if level:
        raise CheckpointError(_too_deep(path))


def _too_deep(path: Path) -> str:
    return f"{path} cannot be read: its lists and objects are nested more than {_MAX_LEVELS} deep"
