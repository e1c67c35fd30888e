"""User's cache of compiled operators: a directory with one directory for each build.

All accesses use one handle on the directory, which other users can neither write to nor replace (`trusted_path`). The
library of a build is loaded through the handle that was checked.

At most `MAX_BUILDS` builds (half a megabyte each) are kept, the most recently used ones. A process holds a shared lock
on the library that it has loaded, and a locked build is not removed.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_ext.trusted_path import open_directory, open_file

LIBRARY = "operators.so"
MAX_BUILDS = 64


def cache_path() -> Path:
    """Return the directory of builds, in $XDG_CACHE_HOME or ~/.cache."""
    # XDG base directory specification: a relative path counts as unset.
    home = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (home if home.is_absolute() else Path.home() / ".cache") / "megatron_ext" / "operators"


@dataclass(frozen=True)
class Library:
    """Open library file that passed the checks.

    Attributes:
        handle: File descriptor; while it is open, the build stays in the cache.
        path: Path of the file, for messages.
    """

    handle: int
    path: Path

    def load(self) -> None:
        """Load the library into this process, through the handle, which stays open.

        Raises:
            OSError: The library cannot be loaded.
        """
        # torch.ops.load_library would resolve the link in /proc and open whatever that path then names.
        ctypes.CDLL(f"/proc/self/fd/{self.handle}")

    def close(self) -> None:
        """Close the handle of a library that is not loaded."""
        os.close(self.handle)


class BuildCache:
    """Open cache directory.

    Attributes:
        path: Path of the directory, for messages.
        folder: The same directory as a path through its handle, valid in this process and until `close`.
    """

    def __init__(self, path: Path) -> None:
        """Open the directory; created if missing.

        Raises:
            UntrustedPathError: Another user may have written a part of the path.
            OSError: The directory cannot be opened or created.
        """
        self._handle = open_directory(path)
        self.path = path
        self.folder = Path(f"/proc/self/fd/{self._handle}")

    def __enter__(self) -> BuildCache:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._handle)

    def find(self, key: str) -> Library | None:
        """Open a build's library, which counts as a use; None if it is not in the cache.

        Raises:
            UntrustedPathError: Another user may have written the library.
            OSError: The library cannot be opened.
        """
        try:
            handle = open_file(self._handle, f"{key}/{LIBRARY}")
        except FileNotFoundError:
            return None
        # Either may fail: the cache may be root's, filled in advance, or on a file system without locks.
        with contextlib.suppress(OSError):
            os.utime(key, dir_fd=self._handle)
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return Library(handle, self.path / key / LIBRARY)

    @contextlib.contextmanager
    def lock(self, key: str, say: Callable[[str], None]) -> Iterator[None]:
        """Hold the exclusive lock of a build; it is released when this process ends, however it ends."""
        handle = self._locked(f"{key}.lock", say)
        try:
            yield
        finally:
            os.close(handle)

    def _locked(self, name: str, say: Callable[[str], None]) -> int:
        while True:
            handle = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=self._handle)
            try:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    say("waiting for another process that compiles the operators")
                    fcntl.flock(handle, fcntl.LOCK_EX)
                if os.fstat(handle).st_nlink:  # otherwise the lock file was removed with its build meanwhile
                    return handle
            except BaseException:
                os.close(handle)
                raise
            os.close(handle)

    @contextlib.contextmanager
    def work_folder(self, key: str) -> Iterator[Path]:
        """Create an empty directory for a build, removed at the end unless it was published; needs the build's lock."""
        for left in self.folder.glob(f"{key}.building-*"):  # left by a killed process
            shutil.rmtree(left, ignore_errors=True)
        work = Path(tempfile.mkdtemp(prefix=f"{key}.building-", dir=self.folder))
        try:
            yield work
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def publish(self, work: Path, key: str) -> None:
        """Move a work folder with a finished library into the build's place; needs the build's lock."""
        (work / LIBRARY).chmod(0o700)  # the linker obeys the umask, which may let a group write
        self._remove_unused(MAX_BUILDS - 1)
        # A removal that was interrupted leaves a folder without its library, which no rename replaces.
        shutil.rmtree(self.folder / key, ignore_errors=True)
        os.rename(work.name, key, src_dir_fd=self._handle, dst_dir_fd=self._handle)

    def _remove_unused(self, kept: int) -> None:
        """Remove the least recently used builds that are not in use, until `kept` are left."""
        builds = sorted((path for path in self.folder.glob(f"*/{LIBRARY}") if not path.parent.suffix), key=_last_use)
        excess = len(builds) - kept
        for library in builds:
            if excess <= 0:
                return
            with contextlib.suppress(OSError):  # in use, or removed by another process just now
                with library.open("rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(library.parent)
                library.parent.with_suffix(".lock").unlink(missing_ok=True)
                excess -= 1


def _last_use(library: Path) -> float:
    """Return the last use in seconds since the epoch; 0 if another process has just removed the build."""
    try:
        return library.parent.stat().st_mtime
    except FileNotFoundError:
        return 0.0
