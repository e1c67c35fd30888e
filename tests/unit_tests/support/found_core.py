"""megatron-core that a child process finds, without the seconds that it takes to import."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.base import found_core


def found() -> list[str]:
    """Version and folder of megatron-core."""
    version, folder = found_core()
    return [version, str(folder)]


def write_found(path: Path) -> None:
    """Write them as JSON."""
    path.write_text(json.dumps(found()))


if __name__ == "__main__":
    write_found(Path(sys.argv[1]))
