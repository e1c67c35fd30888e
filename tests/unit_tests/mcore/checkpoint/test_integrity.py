"""Manifest of SHA-256 digests that megatron-core 0.18 and later write beside a checkpoint on request."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_ext.errors import CheckpointError
from megatron_ext.mcore.checkpoint.checkpoint_files import verify_files

FILES = {".metadata": b"where", "__0_0.distcp": b"weights", "__1_0.distcp": b"", "common.pt": b"arguments"}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Files of a checkpoint and their manifest."""
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    write_manifest(tmp_path)
    return tmp_path


def write_manifest(directory: Path, **changes: object) -> None:
    files = {name: hashlib.sha256(content).hexdigest() for name, content in FILES.items()}
    (directory / "integrity.json").write_text(json.dumps({"algorithm": "sha256", "files": files, **changes}))


def test_intact_files(directory: Path) -> None:
    verify_files(directory)
    (directory / "tokenizer.json").write_text("{}")  # added later, and not listed
    verify_files(directory)


@pytest.mark.parametrize("name", [name for name, content in FILES.items() if content])
def test_a_flipped_byte(name: str, directory: Path) -> None:
    """One of the ranks finds it, whichever reads the file."""
    content = bytearray((directory / name).read_bytes())
    content[-1] ^= 1
    (directory / name).write_bytes(content)
    for shares in (1, 3, 7):
        found = []
        for share in range(shares):
            try:
                verify_files(directory, share, shares)
            except CheckpointError as error:
                found.append(str(error))
        assert len(found) == 1
        assert found[0].startswith(f"{directory / name} is damaged: its SHA-256 is not that in integrity.json")
        assert "\n" not in found[0]


def test_a_missing_file(directory: Path) -> None:
    (directory / "__1_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp: No such file"):
        verify_files(directory)


def test_without_a_manifest(directory: Path) -> None:
    (directory / "integrity.json").unlink()
    (directory / "common.pt").write_bytes(b"other arguments")
    verify_files(directory)


DIGEST = "0" * 64
MANIFESTS: dict[str, Callable[[Path], object]] = {
    "cannot be read": lambda directory: (directory / "integrity.json").write_text("{"),
    "has algorithm 'md5'; only 'sha256' is supported": lambda directory: write_manifest(directory, algorithm="md5"),
    "has no digests of files": lambda directory: write_manifest(directory, files=[]),
    r"has a digest of '\.\./common\.pt', which is not a file name": lambda directory: write_manifest(
        directory, files={"../common.pt": DIGEST}
    ),
    "has a digest of '/etc/passwd', which is not a file name": lambda directory: write_manifest(
        directory, files={"/etc/passwd": DIGEST}
    ),
    "has no SHA-256 of 'common.pt'": lambda directory: write_manifest(directory, files={"common.pt": DIGEST + "0"}),
    "has no SHA-256 of '.metadata'": lambda directory: write_manifest(directory, files={".metadata": None}),
    "pipe: a named pipe; only a regular file is read": lambda directory: (
        os.mkfifo(directory / "pipe"),
        write_manifest(directory, files={"pipe": DIGEST}),
    ),
}


@pytest.mark.parametrize("message", MANIFESTS)
def test_refuses_other_manifests(message: str, directory: Path) -> None:
    MANIFESTS[message](directory)
    with pytest.raises(CheckpointError, match=message) as caught:
        verify_files(directory)
    assert "\n" not in str(caught.value)
