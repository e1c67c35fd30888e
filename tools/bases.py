"""Wheels of megatron-core that tests run with or exchange checkpoints with, unpacked below out/oracles, not installed.

They are for Python 3.12 and x86_64; the modules that the tests use are plain Python, which 3.10 and 3.11 read, too.
"""

from __future__ import annotations

import fcntl
from pathlib import Path

from tools import oracles

# Version -> SHA-256 of its wheel.
WHEELS = {
    "0.16.1": "3fb26cb407aa3c4b609c08664022c08146f1648b3d6f2ef2bbe9d3b1294ace61",
    "0.17.1": "6dd0826489ee70a791e38612b25e914c4a18b0b074f2282353f235ee96273cf2",
    "0.18.2": "c2717b84079bf0bad1151525533a251870d1a86201f8c0702e0b5a6d6b5594f1",
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
