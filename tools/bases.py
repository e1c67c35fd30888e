#!/usr/bin/env python
"""Other versions of megatron-core that tests run with or exchange checkpoints with, none of them installed.

Wheels are unpacked below out/oracles. They are for Python 3.12 and x86_64; the modules that the tests use are plain
Python, which 3.10 and 3.11 read, too. A path names a checkout of Megatron-LM, or any folder that has `megatron/core`.

    python -m tools.bases 0.19.2 python -m pytest -m base

runs a command with a version first on the path, of child processes too; so does `make test BASE=0.19.2`.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tools import oracles

VARIABLE = "MEGATRON_CORE_BASE"
"""Environment variable with the version or the path, for the tests that look at the path."""
# Version -> SHA-256 of its wheel.
WHEELS = {
    "0.16.1": "3fb26cb407aa3c4b609c08664022c08146f1648b3d6f2ef2bbe9d3b1294ace61",
    "0.17.1": "6dd0826489ee70a791e38612b25e914c4a18b0b074f2282353f235ee96273cf2",
    "0.18.2": "c2717b84079bf0bad1151525533a251870d1a86201f8c0702e0b5a6d6b5594f1",
    "0.19.0": "ed4f503a4a6944599857c4f702f3a33039656fe119309119fc5bb8cba8a38240",
    **{one.version: one.digest for one in oracles.LIBRARIES if one.name == "megatron-core"},
}


def fetch(version: str) -> Path:
    """Return the folder to put on the path for a version, after fetching the wheel if it is not there.

    Raises:
        ValueError: As `oracles.download`.
    """
    library = oracles.Library("megatron-core", version, WHEELS[version], oracles.WHEEL_FOR)
    oracles.FOLDER.mkdir(parents=True, exist_ok=True)
    with (oracles.FOLDER / ".lock").open("w") as lock:  # several workers of pytest may ask at once
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.folder.exists():
            oracles.fetch(library)
    return library.packages


def folder_of(base: str) -> Path:
    """Return the folder to put on the path for a version of `WHEELS`, or for the path of a checkout.

    Raises:
        ValueError: It is neither; or as `oracles.download`.
    """
    if base in WHEELS:
        return fetch(base)
    folder = Path(base).resolve()
    if not (folder / "megatron/core/package_info.py").is_file():
        raise ValueError(f"{base} is not the path of a checkout of Megatron-LM, nor one of {', '.join(WHEELS)}")
    return folder


def main(arguments: Sequence[str] | None = None) -> None:
    """Find the version, set the path, and become the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("base", metavar="BASE", help=f"one of {', '.join(WHEELS)}, or the path of a checkout")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="command to run")
    given = parser.parse_args(arguments)
    try:
        folder = folder_of(given.base)
    except ValueError as error:
        sys.exit(f"bases.py: error: {error}")
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    print(f"BASE={given.base}: {folder}", flush=True)
    if given.command:
        os.execvpe(given.command[0], given.command, {**os.environ, "PYTHONPATH": path, VARIABLE: str(folder)})


if __name__ == "__main__":
    main()
