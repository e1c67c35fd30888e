"""Opening of directories and files that no other user can have written or put in place.

A path is walked part by part. Each part is opened relative to the directory before it without following links, and is
checked by its own handle, so a rename between check and use has no effect: the object that was checked is the object
that is returned. Links are resolved explicitly, so the parts of their targets are checked like all others.

A part is trusted if it belongs to root or to this user, and group and others cannot write to it (an access control list
shows in the bits of the group). The mode bits of a link mean nothing; only its owner is checked.

The path may lead through sticky directories that every user can write to, such as /tmp. There only root, the owner of
the directory and the owner of an entry can rename or remove the entry. Both owners are root or this user, because the
next part is checked as well. If another user creates an entry first, its owner is wrong and it is refused. The last
directory must not be of this kind, since its entries are used by any name.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

_PART = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC  # handle of the part itself; needs no read permission
_MAX_LINKS = 40  # per path, as in the kernel


class UntrustedPathError(Exception):
    """Path with a part that another user may have written. The message is one line: the part, why, and a remedy."""


def open_directory(path: Path) -> int:
    """Open a directory for reading; missing parts are created for this user alone.

    Args:
        path: Absolute path.

    Raises:
        UntrustedPathError: A part of the path belongs to a user other than this one or root, or others can write to it.
        OSError: The path cannot be walked; the error has the part's full path.
    """
    handle = _walk(os.open("/", _PART), str(path), is_directory=True)
    try:
        _require_trusted(handle, may_be_sticky=False)
        return os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=handle)
    finally:
        os.close(handle)


def open_file(directory: int, path: str) -> int:
    """Open a regular file for reading.

    Args:
        directory: Handle of a directory that `open_directory` has returned.
        path: Path relative to the directory.

    Raises:
        UntrustedPathError: A part of the path belongs to a user other than this one or root, others can write to it,
            or it is not a regular file.
        FileNotFoundError: A part is missing.
        OSError: The path cannot be walked; the error has the part's full path.
    """
    handle = _walk(os.open(".", _PART, dir_fd=directory), path, is_directory=False)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise UntrustedPathError(f"{name_of(handle)} is not a regular file: remove it")
        return os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(handle)


def name_of(handle: int) -> str:
    """Return the present path of an open file, for messages."""
    return os.readlink(f"/proc/self/fd/{handle}")


def _walk(here: int, path: str, *, is_directory: bool) -> int:
    """Follow `path` from `here`, which is closed; returns the handle of its end.

    Args:
        here: Handle of the directory that the path begins in.
        path: Parts separated by slashes.
        is_directory: Create missing parts, and accept sticky directories.
    """
    parts, links = _parts(path), 0
    try:
        while True:
            _require_trusted(here, may_be_sticky=is_directory)
            if not parts:
                return here
            part = _open_part(here, parts.pop(), is_directory)
            target = _target_or_close(part)
            if target is None:
                here = _replace(here, part)
                continue
            links += 1
            if links > _MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            parts += _parts(target)
            if target.startswith("/"):
                here = _replace(here, os.open("/", _PART))
    except BaseException:
        os.close(here)
        raise


def _replace(old: int, new: int) -> int:
    os.close(old)
    return new


def _parts(path: str) -> list[str]:
    """Return the parts of a path, the last one first."""
    return [part for part in reversed(path.split("/")) if part not in ("", ".")]


def _open_part(directory: int, name: str, create: bool) -> int:
    try:
        try:
            return os.open(name, _PART, dir_fd=directory)
        except FileNotFoundError:
            if not create:
                raise
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=directory)
        return os.open(name, _PART, dir_fd=directory)
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.path.join(name_of(directory), name)) from None


def _target_or_close(part: int) -> str | None:
    """Return the target of a trusted link and close its handle; None if the part is not a link."""
    if not stat.S_ISLNK(os.fstat(part).st_mode):
        return None
    try:
        _require_trusted(part, may_be_sticky=False)
        return os.readlink("", dir_fd=part)
    finally:
        os.close(part)


def _require_trusted(handle: int, may_be_sticky: bool) -> None:
    status = os.fstat(handle)
    kind = "link" if stat.S_ISLNK(status.st_mode) else "directory" if stat.S_ISDIR(status.st_mode) else "file"
    if status.st_uid not in (0, os.geteuid()):
        why = f"the {kind} belongs to another user (uid {status.st_uid})"
        raise UntrustedPathError(f"{name_of(handle)}: {why}; chown it, or name another directory")
    is_shared = kind != "link" and status.st_mode & 0o022 != 0
    if is_shared and not (may_be_sticky and kind == "directory" and status.st_mode & stat.S_ISVTX):
        why = f"other users can write to the {kind} (mode {stat.S_IMODE(status.st_mode):04o})"
        raise UntrustedPathError(f"{name_of(handle)}: {why}; chmod go-w it, or name another directory")
