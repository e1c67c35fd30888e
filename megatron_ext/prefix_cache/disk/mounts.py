"""Type of the file system that a directory is on, from the mount table of the kernel."""

from __future__ import annotations

import os
from pathlib import Path

MOUNT_TABLE = Path("/proc/self/mountinfo")
# Locks and shared maps are unreliable or absent on these, and SQLite needs both to be right.
NETWORK_TYPES = frozenset(
    "9p afs beegfs ceph cifs fuse.ceph fuse.glusterfs fuse.juicefs fuse.s3fs fuse.sshfs gfs2 gpfs lustre ncpfs nfs "
    "nfs4 ocfs2 orangefs pvfs2 smb3 smbfs wekafs".split()
)


def file_system_type(path: str, table: str) -> str:
    """Return the type of the file system at an absolute path without links; empty if the table does not have it.

    Args:
        path: The path.
        table: Text of a mount table; of equal mount points the last one is on top.
    """
    found, longest = "", -1
    for line in table.splitlines():
        fields, _, rest = line.partition(" - ")
        point = _unescaped(fields.split()[4])
        covers = point == "/" or path == point or path.startswith(f"{point}/")
        if covers and len(point) >= longest:
            found, longest = rest.split()[0], len(point)
    return found


def network_type(handle: int) -> str | None:
    """Return the type of the network file system that an open directory is on; None if it is on a local one."""
    found = file_system_type(os.readlink(f"/proc/self/fd/{handle}"), MOUNT_TABLE.read_text(errors="surrogateescape"))
    return found if found in NETWORK_TYPES else None


def _unescaped(point: str) -> str:
    """Return a mount point whose blanks and backslashes are written as octal numbers in the table."""
    for code, character in (("040", " "), ("011", "\t"), ("012", "\n"), ("134", "\\")):
        point = point.replace(f"\\{code}", character)
    return point
