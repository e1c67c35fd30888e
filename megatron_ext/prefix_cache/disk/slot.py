"""Directory of the store: its file system, its marker, and slots, each of which one process holds by a lock.

```
DIR/prefix_cache_marker     a line that names the format; only a directory with it, or an empty one, is used
DIR/slot-0/lock             locked by the process that holds the slot; has its number
DIR/slot-0/*.kv, *.states   entries; see `entry_files.py`
DIR/slot-0-rank-1/          of the second rank of the world whose first rank holds slot 0, with the same files
```
Files belong to this user alone. No other file is ever made, written or removed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from megatron_ext.errors import ConfigError
from megatron_ext.trusted_path import UntrustedPathError, name_of, open_directory

logger = logging.getLogger(__name__)

MARKER = "prefix_cache_marker"
REPORTS = "audits"  # folder of an earlier version
LOCK = "lock"
FORMAT = 7  # of the files; larger ones are refused. No flipped bit of this digit makes it a larger one
MAX_SLOTS = 64

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_MARKER_TEXT = re.compile(rb"megatron_ext prefix cache, format (\d{1,9})\n")
_SLOT_NAME = re.compile(r"slot-(\d{1,2})(?:-rank-(\d{1,5}))?")
_MAX_PID_BYTES = 20


class DiskUnavailableError(Exception):
    """Store that cannot be used on this machine now. The message is one line."""


def unusable(error: DiskUnavailableError) -> ConfigError:
    """Return the error of a start that does not go on without the store."""
    return ConfigError(f"--prefix-cache-dir {error}; give another, or --prefix-cache-dir-optional to go on without it")


class SlotHeldError(ConfigError):
    """Slot that another process holds. The message is one line: the slot, and the process."""


class SlotDirectory:
    """Slot of a directory, held by this process until it is closed.

    Args:
        handle: Handle of the slot's directory.
        lock: Handle of its lock file, locked.

    Attributes:
        handle: Handle of the slot's directory.
        path: Path of the slot.
        number: Number of the slot.
    """

    def __init__(self, handle: int, lock: int) -> None:
        self.handle, self._lock = handle, lock
        self.path = Path(name_of(handle))
        found = _SLOT_NAME.fullmatch(self.path.name)
        self.number = 0 if found is None else int(found[1])

    def check(self) -> None:
        """Check that this process still holds the slot.

        Raises:
            OSError: The lock file was replaced, so another process may hold the slot.
        """
        if not os.path.samestat(os.stat(LOCK, dir_fd=self.handle), os.fstat(self._lock)):
            raise OSError(errno.ESTALE, "the lock was replaced", f"{self.path}/{LOCK}")

    def close(self) -> None:
        """Give the slot up."""
        os.close(self._lock)
        os.close(self.handle)


def slot_name(number: int, rank: int = 0) -> str:
    """Return the name of a slot's directory.

    Args:
        number: Number of the slot.
        rank: Rank among the processes that each keep a part of one cache; rank 0 has the name of a lone process.
    """
    return f"slot-{number}-rank-{rank}" if rank else f"slot-{number}"


def prepare_directory(directory: Path) -> None:
    """Create a directory for the store if it is missing, and check it, as `take_slot` does; no slot is taken.

    Raises:
        ConfigError: See `take_slot`.
        DiskUnavailableError: See `take_slot`.
    """
    with _marked_directory(directory, creates=True):
        pass


def take_slot(directory: Path, first: int = 0) -> SlotDirectory:
    """Take the first slot of a directory that no process holds; directory and slot are created if missing.

    Args:
        directory: The directory.
        first: Number of the first slot to try.

    Raises:
        ConfigError: The directory is not for this, has a newer format, others can write to it, or all slots are held.
        DiskUnavailableError: It is on a network file system, or cannot be read or written.
    """
    with _marked_directory(directory, creates=True) as root:
        holders = []
        for number in range(first, MAX_SLOTS):
            try:
                return _lock_slot(root, slot_name(number), creates=True)
            except SlotHeldError as error:
                holders.append(str(error))
    held = f" ({holders[0]}, ...)" if holders else ""
    raise ConfigError(f"{directory}: all {MAX_SLOTS} slots are held{held}; name another directory")


def take_slot_of_rank(directory: Path, number: int, rank: int) -> SlotDirectory:
    """Take the slot of a rank other than the first; directory and slot are created if missing.

    Args:
        directory: The directory.
        number: Number of the slot that the first rank has taken.
        rank: See `slot_name`.

    Raises:
        SlotHeldError: Another process holds it.
        ConfigError: As `take_slot`, also the next one.
        DiskUnavailableError: See `take_slot`.
    """
    with _marked_directory(directory, creates=True) as root:
        return _lock_slot(root, slot_name(number, rank), creates=True)


def take_all_slots(directory: Path, *, erases: bool = False) -> tuple[list[SlotDirectory], list[SlotHeldError]]:
    """Take every free slot of a directory, for tools; nothing is created.

    Args:
        directory: The directory.
        erases: Whether all entries are to be erased; otherwise a damaged marker or an earlier format is refused.

    Returns:
        The slots that were free, which the caller closes, and an error for each one that is held.

    Raises:
        ConfigError: See `take_slot`, also the next one.
        DiskUnavailableError: See `take_slot`.
    """
    with contextlib.ExitStack() as taken, _marked_directory(directory, creates=False, rewrites=erases) as root:
        slots: list[SlotDirectory] = []
        held: list[SlotHeldError] = []
        for name in sorted(filter(_SLOT_NAME.fullmatch, os.listdir(root)), key=_place):
            try:
                slots.append(_lock_slot(root, name, creates=False))
                taken.callback(slots[-1].close)
            except SlotHeldError as error:
                held.append(error)
        taken.pop_all()
        return slots, held


def _place(name: str) -> tuple[int, int]:
    """Return the place of a slot's name in the order of slots."""
    found = _SLOT_NAME.fullmatch(name)
    assert found is not None, f"{name} is not the name of a slot"
    return int(found[1]), int(found[2] or 0)


@contextlib.contextmanager
def _marked_directory(directory: Path, *, creates: bool, rewrites: bool = True) -> Iterator[int]:
    """Open a directory that has our marker, or is empty and gets it; others that do so wait meanwhile."""
    try:
        if not creates:
            os.stat(directory)
        root = open_directory(directory.absolute())
        try:
            network = network_type(root)
            if network is not None:
                raise DiskUnavailableError(f"{directory} is on a network file system ({network}); name a local one")
            fcntl.flock(root, fcntl.LOCK_EX)
            _require_marker(root, directory, creates=creates, rewrites=rewrites)
            yield root
        finally:
            os.close(root)
    except UntrustedPathError as error:
        raise ConfigError(str(error)) from None
    except OSError as error:
        raise DiskUnavailableError(f"{directory}: {error.strerror}") from None


def _require_marker(root: int, directory: Path, *, creates: bool, rewrites: bool) -> None:
    """Check the marker, or write it: in a new directory, over an earlier format, and over damage beside slots alone."""
    names = os.listdir(root)
    if MARKER not in names and (names or not creates):
        why = f"has other files and no {MARKER}" if names else f"has no {MARKER}"
        raise ConfigError(f"{directory} {why}, so no prefix cache was kept there; name an empty or a new directory")
    handle = _open_file(root, MARKER)
    try:
        text = os.read(handle, 100)
        found, slots = _MARKER_TEXT.fullmatch(text), [name for name in names if _SLOT_NAME.fullmatch(name)]
        version = 0 if found is None else int(found[1])
        if version == FORMAT:
            return
        if version > FORMAT:
            raise ConfigError(
                f"{directory} has format {version} of a later version; this one reads format {FORMAT}: name another "
                "directory"
            )
        is_damaged = bool(slots) and set(names) <= {MARKER, REPORTS, *slots}
        if not (version or is_damaged) and (text or len(names) > 1):  # one that is empty and alone was not finished
            raise ConfigError(f"{directory}/{MARKER} is not the marker of a prefix cache; name another directory")
        if version or is_damaged:
            what = f"has the format {version} of an earlier version" if version else f"has a damaged {MARKER}"
            if not rewrites:
                raise ConfigError(
                    f"{directory} {what}; `erase` removes its entries, and a start writes the marker again"
                )
            remedy = "; entries of that version are erased in each slot that is taken" if version else ""
            logger.warning("prefix cache on disk: %s %s; the marker is written again%s", directory, what, remedy)
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"megatron_ext prefix cache, format {FORMAT}\n".encode(), 0)
        os.fsync(handle)
        os.fsync(root)
    finally:
        os.close(handle)


def _lock_slot(root: int, name: str, *, creates: bool) -> SlotDirectory:
    """Open and lock a slot.

    Raises:
        SlotHeldError: Another process holds it.
        FileNotFoundError: It is missing, and is not to be created.
    """
    if creates:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=root)
    handle = os.open(name, _FOLDER, dir_fd=root)
    try:
        _require_own(name_of(handle), os.fstat(handle))
        lock = _open_file(handle, LOCK)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(lock, _MAX_PID_BYTES).decode("ascii", "replace").strip()
            os.close(lock)
            raise SlotHeldError(f"{name_of(handle)} is held by process {holder or 'of another user'}") from None
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        return SlotDirectory(handle, lock)
    except BaseException:
        os.close(handle)
        raise


def _open_file(directory: int, name: str) -> int:
    """Open a file that is this user's alone, without following a link; created if missing."""
    handle = os.open(name, _FILE | os.O_CREAT, 0o600, dir_fd=directory)
    try:
        require_own_file(directory, name, os.fstat(handle))
    except BaseException:
        os.close(handle)
        raise
    return handle


def require_own_file(directory: int, name: str, status: os.stat_result) -> None:
    """Check that a file in a directory is a regular one of this user alone.

    Raises:
        UntrustedPathError: It is not.
    """
    path = f"{name_of(directory)}/{name}"
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
        raise UntrustedPathError(f"{path} is not a regular file with one name; name another directory")
    _require_own(path, status)


def _require_own(path: str, status: os.stat_result) -> None:
    """Check that a file or directory belongs to this user, and that no other one can write to it."""
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        why = f"uid {status.st_uid}, mode {stat.S_IMODE(status.st_mode):04o}"
        raise UntrustedPathError(f"{path} is not this user's alone ({why}); name another directory")


def failure_reason(error: Exception) -> str:
    """Return why an operation failed, with the name of the file if that is known."""
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error) or type(error).__name__
    return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"


MOUNT_TABLE = Path("/proc/self/mountinfo")
# Locks are unreliable or absent on these.
NETWORK_TYPES = frozenset(
    "9p afs beegfs ceph cifs fuse.ceph fuse.glusterfs fuse.juicefs fuse.s3fs fuse.sshfs gfs2 gpfs lustre ncpfs nfs "
    "nfs4 ocfs2 orangefs pvfs2 smb3 smbfs wekafs".split()
)


def network_type(handle: int) -> str | None:
    """Return the type of the network file system that an open directory is on; None if it is on a local one."""
    info = dict(line.split(maxsplit=1) for line in Path(f"/proc/self/fdinfo/{handle}").read_text().splitlines())
    for line in MOUNT_TABLE.read_text(errors="surrogateescape").splitlines():
        mount, _, file_system = line.partition(" - ")
        found = file_system.split()[0]
        if mount.split()[0] == info.get("mnt_id:") and found in NETWORK_TYPES:
            return found
    return None
