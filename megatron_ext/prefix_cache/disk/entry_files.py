"""Files of entries in a slot, one for each: its name describes the entry, and its last change is the entry's last use.

A file has a checksum, the token ids, and the bytes of the block or snapshot; the checksum covers the name, too. A file
gets its name when it is written in full, so a killed process leaves whole files only; what a loss of power leaves is
found out at the next read. A file that was removed is gone from the medium after `sync`.
"""

from __future__ import annotations

import contextlib
import os
import re
import zlib
from array import array
from collections.abc import Sequence
from typing import BinaryIO

from megatron_ext.prefix_cache.disk.entry import CHECKSUM_BYTES, Buffer, StoredEntry, from_file
from megatron_ext.prefix_cache.disk.slot import require_own_file
from megatron_ext.prefix_cache.disk.store_use import BAD_BYTES, BAD_TOKENS, TOO_SHORT
from megatron_ext.trusted_path import UntrustedPathError

UNFINISHED = "new"  # name of the file that is being written
_USELESS = re.compile(rf"{UNFINISHED}|data|index\.sqlite(-wal|-shm|-journal)?")  # also the files of an earlier format
_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC


class DamagedEntryError(Exception):
    """Entry that cannot be used. The message is the reason, see `REASONS`."""


class EntryFiles:
    """Files of entries in the directory of a slot.

    Args:
        folder: Handle of the directory.
    """

    def __init__(self, folder: int) -> None:
        self._folder = folder

    def entries(self) -> list[StoredEntry]:
        """Return the entries of all files, and remove a file that was not finished; other files are left alone.

        Raises:
            UntrustedPathError: The file of an entry is not a regular file of this user alone.
        """
        found = []
        with os.scandir(self._folder) as files:
            for file in files:
                status = file.stat(follow_symlinks=False)
                entry = from_file(file.name, status.st_mtime, status.st_size)
                if entry is not None:
                    require_own_file(self._folder, file.name, status)
                    found.append(entry)
                elif _USELESS.fullmatch(file.name):
                    os.unlink(file.name, dir_fd=self._folder)
        return found

    def erase(self) -> int:
        """Remove the files of all entries, from the medium too when this returns; return their number.

        Raises:
            UntrustedPathError: A file is left, see `entries`; all others are gone.
            OSError: A file cannot be removed; all others are gone.
        """
        count = 0
        errors: list[Exception] = []
        for name in os.listdir(self._folder):
            is_entry = from_file(name, 0.0, 0) is not None
            try:
                if is_entry:
                    require_own_file(self._folder, name, os.stat(name, dir_fd=self._folder, follow_symlinks=False))
                if is_entry or _USELESS.fullmatch(name):
                    os.unlink(name, dir_fd=self._folder)
                    count += is_entry
            except (OSError, UntrustedPathError) as error:
                errors.append(error)
        self.sync()
        if errors:
            raise errors[0]
        return count

    def write(self, entry: StoredEntry, tokens: array[int], buffers: Sequence[Buffer]) -> None:
        """Write the file of an entry.

        Raises:
            OSError: There is no room, or the device fails.
        """
        head = _head(entry, tokens.tobytes(), buffers)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _FLAGS
        try:
            with os.fdopen(os.open(UNFINISHED, flags, 0o600, dir_fd=self._folder), "wb") as file:
                for part in (head, *buffers):
                    file.write(part)
            self._set_used(UNFINISHED, entry.used)
            os.rename(UNFINISHED, entry.name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        except (OSError, MemoryError):
            with contextlib.suppress(OSError):
                os.unlink(UNFINISHED, dir_fd=self._folder)
            raise

    def read(self, entry: StoredEntry, into: Sequence[Buffer]) -> array[int]:
        """Fill writable buffers with the bytes of an entry, and return its token ids.

        Raises:
            DamagedEntryError: The file is gone, has another size or is damaged; the buffers' contents are undefined.
            OSError: The device fails.
        """
        with self._opened(entry) as file:
            head = file.read(entry.head_bytes)
            counts = [file.readinto(buffer) for buffer in into]  # type: ignore[attr-defined]
        tokens = _tokens(entry, head)
        if counts != [memoryview(buffer).nbytes for buffer in into]:
            raise DamagedEntryError(TOO_SHORT)
        if head != _head(entry, head[CHECKSUM_BYTES:], into):
            raise DamagedEntryError(BAD_BYTES)
        return tokens

    def read_tokens(self, entry: StoredEntry) -> array[int]:
        """Return the token ids of an entry; for errors see `read`."""
        with self._opened(entry) as file:
            return _tokens(entry, file.read(entry.head_bytes))

    def _opened(self, entry: StoredEntry) -> BinaryIO:
        try:
            return os.fdopen(os.open(entry.name, os.O_RDONLY | _FLAGS, dir_fd=self._folder), "rb")
        except FileNotFoundError:
            raise DamagedEntryError(TOO_SHORT) from None

    def set_used(self, entry: StoredEntry) -> None:
        """Store the time of last use of an entry, if its file is there."""
        with contextlib.suppress(FileNotFoundError):
            self._set_used(entry.name, entry.used)

    def _set_used(self, name: str, used: float) -> None:
        os.utime(name, (used, used), dir_fd=self._folder, follow_symlinks=False)

    def remove(self, entry: StoredEntry) -> None:
        """Remove the file of an entry, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(entry.name, dir_fd=self._folder)

    def sync(self) -> None:
        """Return when all changes of names are on the medium."""
        os.fsync(self._folder)


def _head(entry: StoredEntry, tokens: bytes, buffers: Sequence[Buffer]) -> bytes:
    """Return the first bytes of an entry's file: the CRC-32 of its name and all that follows, and the token ids."""
    checksum = zlib.crc32(entry.name.encode() + tokens)
    for buffer in buffers:
        checksum = zlib.crc32(buffer, checksum)
    return checksum.to_bytes(CHECKSUM_BYTES, "little") + tokens


def _tokens(entry: StoredEntry, head: bytes) -> array[int]:
    """Return the token ids after the checksum; the block hash tells whether they are right."""
    if len(head) < entry.head_bytes:
        raise DamagedEntryError(TOO_SHORT)
    tokens = array("I", head[CHECKSUM_BYTES:])
    if not entry.described(tokens).is_genuine:
        raise DamagedEntryError(BAD_TOKENS)
    return tokens
