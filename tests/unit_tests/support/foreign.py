"""Files of another user, for tests that run as root and for tests that do not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

OTHER_USER = 65534


class ForeignFiles:
    """Ownership of files, directories and links by another user: by chown as root, else by a patched `os.fstat`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._ids: set[tuple[int, int]] = set()
        self._fstat = os.fstat
        self._can_chown = os.geteuid() == 0
        if not self._can_chown:
            monkeypatch.setattr(os, "fstat", self._told)

    def add(self, path: Path) -> None:
        status = path.lstat()
        self._ids.add((status.st_dev, status.st_ino))
        if self._can_chown:
            os.chown(path, OTHER_USER, -1, follow_symlinks=False)

    def has(self, handle: int) -> bool:
        """Return whether an open file is one of these."""
        status = self._fstat(handle)
        return (status.st_dev, status.st_ino) in self._ids

    def _told(self, handle: int) -> os.stat_result:
        status = self._fstat(handle)
        if (status.st_dev, status.st_ino) not in self._ids:
            return status
        fields = list(status)
        fields[4] = OTHER_USER
        return os.stat_result(fields)
