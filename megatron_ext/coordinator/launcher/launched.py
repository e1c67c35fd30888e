"""Launched replicas that outlive their coordinator: directories, records in them, and processes found again.

A coordinator that listens on a port of its own keeps a directory for it, with a directory of each replica that it
launched: the sockets of its KV events, and a record of its process. The next coordinator on this port finds them there.
All directories have mode 0700, so that their contents are this user's.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ext.config.kv_events import LONGEST_IPC_PATH
from megatron_ext.errors import ConfigError
from megatron_ext.files import read_json

RECORD = "replica.json"
SOCKETS = {  # of a replica's KV events, in a directory of its own
    "--kv-events-endpoint": "events",
    "--kv-events-replay-endpoint": "replay",
    "--kv-events-states-endpoint": "states",
    "--kv-events-states-replay-endpoint": "states-replay",
}
_DIRECTORY_PREFIX = "kv-events-"
_LONGEST_RECORD = 1 << 16  # bytes
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@contextlib.contextmanager
def fleet_directory(port: int) -> Iterator[Path]:
    """Create or find the directory of the replicas launched from a port, and lock it.

    Args:
        port: Port that the coordinator listens on; it is the same after a restart.

    Raises:
        ConfigError: The directory cannot be created, is not this user's alone, or another coordinator uses it.
    """
    path = Path(tempfile.gettempdir(), f"megatron_ext-fleet-{os.getuid()}-{port}")
    remedy = "let TMPDIR name another directory, or give --replicas-end-with-coordinator"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise ConfigError(f"no directory for launched replicas: {error.strerror}: {path}; {remedy}") from None
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise ConfigError(f"{path} is not a directory that only this user can enter; {remedy}")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another coordinator keeps its replicas in {path}; {remedy}") from None
        yield path
        with contextlib.suppress(OSError):  # not empty: replicas go on
            path.rmdir()
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def private_directory(parent: Path | None = None) -> Iterator[Path]:
    """Create a directory of mode 0700 for sockets, deleted at the end with its contents.

    Args:
        parent: Directory to create it in; by default that of temporary files.

    Raises:
        ConfigError: The directory cannot be created, or its path is too long for a socket's.
    """
    try:
        place = tempfile.TemporaryDirectory(prefix=_DIRECTORY_PREFIX, dir=parent, ignore_cleanup_errors=True)
    except OSError as error:
        raise ConfigError(
            f"no directory for the sockets of KV events: {error.strerror}: {error.filename}; "
            "set TMPDIR to a writable directory"
        ) from None
    with place as name:
        length = max(len(os.fsencode(os.path.join(name, one))) for one in SOCKETS.values())
        if length > LONGEST_IPC_PATH:
            raise ConfigError(
                f"TMPDIR: a socket of KV events in {name} would have a path of {length} bytes, and the limit is "
                f"{LONGEST_IPC_PATH}; set TMPDIR to a directory with a shorter path"
            )
        yield Path(name)


@dataclass(frozen=True)
class LaunchRecord:
    """Record of a launched process, for the next coordinator.

    Attributes:
        index: Number of the replica.
        pid: Process id, also of its session.
        started: Boot and moment at which the process started, since ids are used again.
        plan: Fingerprint of the flags and the environment that it was started with.
        url: URL of the replica; None until it is ready.
    """

    index: int
    pid: int
    started: str
    plan: str
    url: str | None = None

    def write(self, directory: Path) -> None:
        """Write the record, replacing an earlier one as a whole."""
        new = directory / f"{RECORD}.new"
        new.write_text(json.dumps(dataclasses.asdict(self)))
        new.replace(directory / RECORD)

    @classmethod
    def read(cls, directory: Path) -> LaunchRecord | None:
        """Return the record of a directory; None if it cannot be read."""
        try:
            fields: dict[str, Any] = read_json(directory / RECORD, _LONGEST_RECORD)
            return cls(**fields)
        except (ConfigError, TypeError):
            return None


def start_of(pid: int) -> str:
    """Return boot and moment at which a process started.

    Raises:
        ProcessLookupError: There is no such process.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except FileNotFoundError:
        raise ProcessLookupError(pid) from None
    if fields[0] in "ZX":  # it has ended, and waits for its parent
        raise ProcessLookupError(pid)
    return f"{_BOOT.read_text().strip()} {fields[19]}"


class FoundReplica:
    """Process that an earlier coordinator launched, with the methods of `asyncio.subprocess.Process` for its end.

    Args:
        record: Record of the process.
        directory: Directory of its sockets and its record.

    Raises:
        ProcessLookupError: The process has ended.
    """

    def __init__(self, record: LaunchRecord, directory: Path) -> None:
        self.record = record
        self.directory = directory
        self.pid = record.pid
        self.returncode: int | None = None
        self._descriptor = os.pidfd_open(record.pid)
        try:
            if start_of(record.pid) != record.started:  # another process with this id
                raise ProcessLookupError(record.pid)
        except ProcessLookupError:
            os.close(self._descriptor)
            raise

    def send_signal(self, number: int) -> None:
        """Send a signal to the process."""
        signal.pidfd_send_signal(self._descriptor, number)

    async def wait(self) -> int:
        """Wait for the end of the process, whose code only its parent learns; return 0."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        if self.returncode is None:
            loop.add_reader(self._descriptor, ended.set)
            try:
                await ended.wait()
            finally:
                loop.remove_reader(self._descriptor)
            self.returncode = 0
        return self.returncode

    def forget(self) -> None:
        """Delete the directory of the process, which has ended."""
        os.close(self._descriptor)
        shutil.rmtree(self.directory, ignore_errors=True)


def find_replicas(home: Path) -> list[FoundReplica]:
    """Return the replicas whose records are in a directory and that are running; delete what others left."""
    found = []
    for directory in sorted(path for path in home.iterdir() if path.is_dir()):
        record = LaunchRecord.read(directory)
        try:
            if record is None:
                raise ProcessLookupError
            found.append(FoundReplica(record, directory))
        except ProcessLookupError:
            shutil.rmtree(directory, ignore_errors=True)
    return found
