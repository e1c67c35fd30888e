"""Reports of audits: a file for each wrong entry of the prefix cache, for this user alone, and no more than a few."""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Final

from megatron_ext.errors import ConfigError
from megatron_ext.trusted_path import UntrustedPathError, open_directory

logger = logging.getLogger(__name__)

MAX_REPORTS: Final = 64
"""Reports that a directory keeps; the oldest go."""
_NAME: Final = re.compile(r"audit-\d{8}T\d{6}Z-\d+-\d+\.json")
_FLAGS: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class AuditReports:
    """Directory of reports, created with the first one.

    Args:
        directory: The directory; only files with the names of reports are ever removed from it.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory.absolute()
        self._numbers = count(1)

    def require(self) -> None:
        """Check the directory now, and create it if missing.

        Raises:
            ConfigError: It cannot be opened, or others can write to it.
        """
        try:
            os.close(open_directory(self._directory))
        except UntrustedPathError as error:
            raise ConfigError(f"--prefix-cache-audit-dir: {error}") from None
        except OSError as error:
            raise ConfigError(f"--prefix-cache-audit-dir {self._directory}: {error.strerror}; name another") from None

    def write(self, finding: Mapping[str, object]) -> None:
        """Write the report of a finding; a failure is logged, and costs that report only.

        Args:
            finding: Values by name, for JSON.
        """
        name = f"audit-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{os.getpid()}-{next(self._numbers)}.json"
        try:
            directory = open_directory(self._directory)
            try:
                self._make_room(directory)
                file = os.open(name, _FLAGS, 0o600, dir_fd=directory)
                with os.fdopen(file, "w", encoding="utf-8") as report:
                    report.write(json.dumps(finding, indent=1, allow_nan=False) + "\n")
            finally:
                os.close(directory)
        except (UntrustedPathError, OSError) as error:
            logger.warning("an audit's report was not written to %s: %s", self._directory, error)

    def _make_room(self, directory: int) -> None:
        reports = [name for name in os.listdir(directory) if _NAME.fullmatch(name)]
        reports.sort(key=lambda name: (os.stat(name, dir_fd=directory, follow_symlinks=False).st_mtime_ns, name))
        for name in reports[: max(0, len(reports) + 1 - MAX_REPORTS)]:
            os.unlink(name, dir_fd=directory)
