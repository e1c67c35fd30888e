"""Integrity manifest of a distributed checkpoint: SHA-256 digests that megatron-core 0.18 and later write on request.

`integrity.json` is {"algorithm": "sha256", "files": {name: digest}}. It detects damage, not forgery: a checkpoint's
author writes it, too.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

from megatron_ext.errors import CheckpointError
from megatron_ext.files import open_regular, read_json
from megatron_ext.mcore.checkpoint.checkpoint_metadata import is_file_name

MANIFEST_FILE = "integrity.json"
_ALGORITHM = "sha256"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_LONGEST_MANIFEST = 64 * 1024**2  # bytes; a manifest of 100,000 files has 10 MB
_CHUNK = 16 * 1024**2  # bytes that are read at a time


def verify_files(directory: Path, share: int = 0, shares: int = 1) -> None:
    """Compare files with their digests in the manifest; without a manifest there is nothing to verify.

    Args:
        directory: Directory of a checkpoint's files.
        share: Which of the shares to verify: all ranks together verify all files.
        shares: Number of shares.

    Raises:
        CheckpointError: A file is missing, not a regular one, or has another digest; or the manifest is damaged.
    """
    if not os.path.lexists(directory / MANIFEST_FILE):
        return
    digests = _read_manifest(directory / MANIFEST_FILE)
    for name in sorted(digests)[share::shares]:
        if _digest(directory / name) != digests[name]:
            raise CheckpointError(
                f"{directory / name} is damaged: its SHA-256 is not that in {MANIFEST_FILE}; copy the checkpoint again"
            )


def _read_manifest(path: Path) -> Mapping[str, str]:
    manifest = read_json(path, _LONGEST_MANIFEST)
    algorithm, digests = manifest.get("algorithm", _ALGORITHM), manifest.get("files")
    if algorithm != _ALGORITHM:
        raise CheckpointError(f"{path} has algorithm {str(algorithm)[:40]!r}; only {_ALGORITHM!r} is supported")
    if not isinstance(digests, dict):
        raise CheckpointError(f"{path} has no digests of files")
    for name, digest in digests.items():
        if not is_file_name(name):
            raise CheckpointError(f"{path} has a digest of {name[:100]!r}, which is not a file name")
        if type(digest) is not str or not _DIGEST.fullmatch(digest):
            raise CheckpointError(f"{path} has no SHA-256 of {name[:100]!r}: 64 digits from 0 to f")
    return digests


def _digest(path: Path) -> str:
    found = hashlib.sha256()
    with open_regular(path, CheckpointError) as file:
        while chunk := file.read(_CHUNK):
            found.update(chunk)
    return found.hexdigest()
