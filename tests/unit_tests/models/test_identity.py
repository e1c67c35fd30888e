"""RP-6, DC-2: identity of a model: hashes of its tokenizer and of samples of its weights, and their whole digest."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from megatron_ext.config import ParallelConfig
from megatron_ext.config.differences import EMBEDDED_MODEL_DIR
from megatron_ext.models import identity
from megatron_ext.models.identity import (
    SAMPLE_BYTES,
    SAMPLES,
    cache_facts,
    tokenizer_hash,
    weights_digest,
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


def test_tensors_count_by_name_type_shape_and_value():
    """DC-2."""

    def model(*shape: int, name: str = "w", dtype: torch.dtype = torch.float32, last: float = 0.0) -> nn.Module:
        made = nn.Module()
        values = torch.zeros(shape, dtype=dtype)
        values.flatten()[-1] = last
        made.register_parameter(name, nn.Parameter(values))
        made.register_buffer("b", torch.ones(2, dtype=torch.bfloat16))
        return made

    assert weights_digest(model(2, 3)) == weights_digest(model(2, 3))
    models = [
        model(2, 3),
        model(3, 2),
        model(2, 3, name="v"),
        model(2, 3, last=1.0),
        model(2, 3, dtype=torch.float64),
        model(2, 3, last=-0.0),
    ]
    models[-1].b[1] = 2
    assert len({weights_digest(one) for one in models}) == len(models)


def test_entries_depend_on_the_weights_of_all_ranks():
    """DC-2: the other rank may have experts of its own; more replicas of equal weights change nothing."""
    loaded = SimpleNamespace(tokenizer=NullTokenizer(50))

    def facts(*digests: bytes) -> list[bytes]:
        ranks = SimpleNamespace(gather=lambda own: [own, *digests], here=SimpleNamespace(tensor=0, pipeline=0))
        return cache_facts(loaded, b"own", ParallelConfig(), ranks)

    assert facts(b"other") != facts(b"another") != facts()
    assert facts(b"own") == facts()
    assert facts(b"other", b"own") == facts(b"other")
