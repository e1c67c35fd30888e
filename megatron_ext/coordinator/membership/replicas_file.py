"""File of replica URLs: one URL a line, read again when it changes."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

from megatron_ext.config.coordinator import replica_problem
from megatron_ext.coordinator.membership.fleet import Fleet
from megatron_ext.coordinator.membership.member import Source
from megatron_ext.errors import ConfigError
from megatron_ext.files import read_text

logger = logging.getLogger(__name__)

INTERVAL = 1.0  # seconds between two checks
LARGEST = 1 << 20  # bytes


def read_replicas(file: str) -> list[str]:
    """Return the URLs of a file. Empty lines and those that begin with # are skipped.

    Raises:
        ConfigError: The file cannot be read, or a line is not a replica's URL, or is repeated.
    """
    urls: list[str] = []
    for number, line in enumerate(read_text(Path(file), LARGEST).splitlines(), start=1):
        url = line.strip()
        if not url or url.startswith("#"):
            continue
        problem = replica_problem(url)
        if problem is None and url in urls:
            problem = "is listed twice; list each replica once"
        if problem is not None:
            raise ConfigError(f"--replicas-file {file}, line {number}: {url[:200]!r} {problem}")
        urls.append(url)
    return urls


class ReplicasFile:
    """Synchronizes the fleet with a file. Replicas that are removed from the file drain, and then leave.

    Args:
        file: Path of the file.
        fleet: Fleet that the replicas join.

    Raises:
        ConfigError: The file is invalid at the start. Later mistakes are logged, and nothing changes.
    """

    def __init__(self, file: str, fleet: Fleet) -> None:
        self._file = file
        self._fleet = fleet
        self._urls = read_replicas(file)
        self._seen = self._stamp()

    def join(self) -> None:
        """Add the replicas of the file to the fleet."""
        for url in self._urls:
            self._fleet.add(url, Source.FILE)

    async def run(self) -> None:
        """Check the file until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL)
            self.look()

    def look(self) -> None:
        """Read the file if it has changed."""
        try:
            stamp = self._stamp()
            if stamp == self._seen:
                return
            self._seen = stamp
            urls = read_replicas(self._file)
        except (ConfigError, OSError) as error:
            logger.error("%s; the replicas are unchanged", error)
            return
        removed = [url for url in self._urls if url not in urls]
        self._urls = urls
        for url in removed:
            member = self._fleet.members.get(url)
            if member is not None and member.source is Source.FILE:
                self._fleet.drain(url, leaves=True)
        self.join()

    def _stamp(self) -> tuple[int, int, int]:
        try:
            found = os.stat(self._file)
        except OSError as error:
            self._seen = (0, 0, 0)  # logged once, and read when the file exists again
            raise ConfigError(f"--replicas-file {self._file}: {error.strerror}") from error
        return found.st_mtime_ns, found.st_size, found.st_ino
