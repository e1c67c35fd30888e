"""Reading a small file that somebody else wrote: a regular one, of a size that is stated, and no more than that."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from megatron_ext.errors import ConfigError

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


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
        return _read(path, limit, error).decode("utf-8")
    except OSError as problem:
        raise error(f"{path}: {problem.strerror or problem}") from None
    except UnicodeDecodeError:
        raise error(f"{path}: not a text file in UTF-8") from None


def _read(path: str | Path, limit: int, error: type[ConfigError]) -> bytes:
    _require_regular(path, os.stat(path), error)  # opening a device may do something already
    # Between the two calls it may have become a pipe, whose opening would wait for a writer.
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    with open(handle, "rb") as file:
        status = os.fstat(handle)
        _require_regular(path, status, error)
        content = file.read(limit + 1) if status.st_size <= limit else b""
    if status.st_size > limit or len(content) > limit:  # it may have grown; those of /proc say that they are empty
        raise error(f"{path}: {max(status.st_size, len(content))} bytes or more; such a file may have {limit}")
    return content


def _require_regular(path: str | Path, status: os.stat_result, error: type[ConfigError]) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise error(f"{path}: {kind}; only a regular file is read")
