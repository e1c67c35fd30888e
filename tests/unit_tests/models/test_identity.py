"""RP-6, DC-2: identity of a model: hashes of its tokenizer and of samples of its weights, and their whole digest."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from megatron_ext.config.differences import EMBEDDED_MODEL_DIR
from megatron_ext.models import identity
from megatron_ext.models.identity import (
    DIGEST_FILE,
    SAMPLE_BYTES,
    SAMPLES,
    files_digest,
    tensors_digest,
    tokenizer_hash,
    weights_hash,
)
from megatron_ext.text.tokenizer import NullTokenizer, TextTokenizer


def test_hash_of_a_tokenizer(tmp_path):
    """A copy is equal, another template is not; nor is another one without a serialized form."""
    shutil.copytree(EMBEDDED_MODEL_DIR, tmp_path / "copy")
    expected = tokenizer_hash(TextTokenizer(EMBEDDED_MODEL_DIR))
    assert tokenizer_hash(TextTokenizer(tmp_path / "copy")) == expected
    template = tmp_path / "copy/chat_template.jinja"
    template.write_text(template.read_text() + "x")
    assert tokenizer_hash(TextTokenizer(tmp_path / "copy")) != expected

    class Reversed(NullTokenizer):
        def detokenize(self, ids, skip_special_tokens=True):
            return super().detokenize(ids)[::-1]

    assert tokenizer_hash(Reversed(50)) != tokenizer_hash(NullTokenizer(50)) == tokenizer_hash(NullTokenizer(50))


def write(path: Path, size: int, changed: int | None = None) -> Path:
    """A file of zeros, of which one byte may be another one."""
    content = bytearray(size)
    if changed is not None:
        content[changed] = 1
    path.mkdir(exist_ok=True)
    (path / "model.safetensors").write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("parts", "changed"),
    [(1, SAMPLE_BYTES), (1, SAMPLES * SAMPLE_BYTES - 1), (8, 0), (8, SAMPLE_BYTES - 1), (8, -1), (8, -SAMPLE_BYTES)],
)
def test_hash_of_samples(tmp_path, parts, changed):
    """Small files are read whole, large ones at their beginning, their end, and between; names and sizes count."""
    size = parts * SAMPLES * SAMPLE_BYTES
    starts = identity._starts(size)
    assert (len(starts), starts[0], starts[-1]) == (SAMPLES, 0, size - SAMPLE_BYTES)
    expected = weights_hash(write(tmp_path / "a", size))
    assert weights_hash(write(tmp_path / "b", size)) == expected
    assert weights_hash(write(tmp_path / "c", size, changed)) != expected
    (tmp_path / "a" / "README.md").write_text("not weights")
    assert weights_hash(tmp_path / "a") == expected
    (tmp_path / "a" / "model.safetensors").rename(tmp_path / "a" / "other.safetensors")
    assert weights_hash(tmp_path / "a") != expected
    assert weights_hash(write(tmp_path / "b", size + 1)) != expected


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


def test_every_byte_and_name_counts(checkpoint, tmp_path, monkeypatch):
    """DC-2."""
    first = files_digest(checkpoint)
    assert files_digest(checkpoint) == first
    flip(checkpoint / "model-2.safetensors")
    second = files_digest(checkpoint)
    assert second != first
    shutil.copytree(checkpoint, tmp_path / "other")
    (tmp_path / "other" / "notes.txt").touch()
    monkeypatch.setattr(identity, "REMEMBERED_BYTES", 10**6)  # small ones leave no file
    (tmp_path / "other" / DIGEST_FILE).unlink()
    assert files_digest(tmp_path / "other") == second
    assert not (tmp_path / "other" / DIGEST_FILE).exists()
    (checkpoint / "model-2.safetensors").rename(checkpoint / "model-3.safetensors")
    assert files_digest(checkpoint) not in (first, second)


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
