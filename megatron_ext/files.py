"""Reading a small file that somebody else wrote: a regular one, of a size that is stated, and no more than that."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from megatron_ext.errors import ConfigError

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
