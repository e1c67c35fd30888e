"""Digest of weights by their content: what changes it, when it is believed, and where it is kept."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from megatron_ext.models import identity
from megatron_ext.models.identity import DIGEST_FILE, files_digest, tensors_digest


@pytest.fixture
def checkpoint(tmp_path, monkeypatch) -> Path:
    """A checkpoint of two files, large enough for its digest to be kept."""
    monkeypatch.setattr(identity, "REMEMBERED_BYTES", 1000)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    for name in ("model-1.safetensors", "model-2.safetensors", "config.json"):
        (directory / name).write_bytes(name.encode() * 100)
    return directory


def flip(path: Path, *, keeps_time: bool = False) -> None:
    """Change a byte of a file in place."""
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[500] ^= 1
    path.write_bytes(data)
    times = before.st_mtime_ns + (0 if keeps_time else 1)
    os.utime(path, ns=(times, times))


def test_every_byte_and_name_counts(checkpoint):
    """DC-2."""
    first = files_digest(checkpoint)
    assert files_digest(checkpoint) == first
    flip(checkpoint / "model-2.safetensors")
    second = files_digest(checkpoint)
    assert second != first
    (checkpoint / "model-2.safetensors").rename(checkpoint / "model-3.safetensors")
    assert files_digest(checkpoint) not in (first, second)


def test_equal_checkpoints_have_equal_digests(checkpoint, tmp_path):
    """DC-2: also where other files lie beside them."""
    first = files_digest(checkpoint)
    shutil.copytree(checkpoint, tmp_path / "other")
    (tmp_path / "other" / "notes.txt").touch()
    assert files_digest(tmp_path / "other") == first


def test_a_kept_digest_is_believed_while_the_files_agree(checkpoint):
    """DC-2: a file is not read again; only one that was changed without a trace goes unnoticed."""
    first = files_digest(checkpoint)
    assert json.loads((checkpoint / DIGEST_FILE).read_text())["digest"] == first.hex()
    flip(checkpoint / "model-1.safetensors", keeps_time=True)
    assert files_digest(checkpoint) == first
    (checkpoint / DIGEST_FILE).unlink()
    assert files_digest(checkpoint) != first


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": 1, "digest": "zz", "files": []}', '{"digest": 7}'])
def test_a_damaged_digest_is_made_again(checkpoint, content):
    first = files_digest(checkpoint)
    (checkpoint / DIGEST_FILE).write_text(content)
    assert files_digest(checkpoint) == first
    assert json.loads((checkpoint / DIGEST_FILE).read_text())["digest"] == first.hex()


def test_a_directory_that_cannot_be_written_has_its_digest_in_the_cache(checkpoint, tmp_path):
    """DC-2: a directory of that name stands for a place that nothing can be written to."""
    (checkpoint / DIGEST_FILE).mkdir()
    first = files_digest(checkpoint)
    (kept,) = (tmp_path / "cache").rglob("*.json")
    assert json.loads(kept.read_text())["digest"] == first.hex()
    flip(checkpoint / "model-1.safetensors", keeps_time=True)
    assert files_digest(checkpoint) == first


def test_small_checkpoints_leave_no_file(checkpoint, monkeypatch, tmp_path):
    monkeypatch.setattr(identity, "REMEMBERED_BYTES", 10**6)
    files_digest(checkpoint)
    assert not (checkpoint / DIGEST_FILE).exists()
    assert not (tmp_path / "cache").exists()


def test_tensors_count_by_name_type_shape_and_value():
    """DC-2."""

    def model(*shape: int, name: str = "w", dtype: torch.dtype = torch.float32, last: float = 0.0) -> nn.Module:
        made = nn.Module()
        values = torch.zeros(shape, dtype=dtype)
        values.flatten()[-1] = last
        made.register_parameter(name, nn.Parameter(values))
        made.register_buffer("b", torch.ones(2, dtype=torch.bfloat16))
        return made

    assert tensors_digest(model(2, 3)) == tensors_digest(model(2, 3))
    models = [
        model(2, 3),
        model(3, 2),
        model(2, 3, name="v"),
        model(2, 3, last=1.0),
        model(2, 3, dtype=torch.float64),
        model(2, 3, last=-0.0),
    ]
    models[-1].b[1] = 2
    assert len({tensors_digest(one) for one in models}) == len(models)
