"""RP-6: equal tokenizers and checkpoints have equal hashes, and others have other ones."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megatron_ext.config.differences import EMBEDDED_MODEL_DIR
from megatron_ext.models import identity
from megatron_ext.models.identity import SAMPLE_BYTES, SAMPLES, tokenizer_hash, weights_hash
from megatron_ext.text.tokenizer import NullTokenizer, TextTokenizer


def write(path: Path, size: int, changed: int | None = None) -> Path:
    """A file of zeros, of which one byte may be another one."""
    content = bytearray(size)
    if changed is not None:
        content[changed] = 1
    path.mkdir(exist_ok=True)
    (path / "model.safetensors").write_bytes(content)
    return path


class TestTokenizer:
    def test_a_copy_is_equal_and_another_template_is_not(self, tmp_path):
        shutil.copytree(EMBEDDED_MODEL_DIR, tmp_path / "copy")
        expected = tokenizer_hash(TextTokenizer(EMBEDDED_MODEL_DIR))
        assert tokenizer_hash(TextTokenizer(tmp_path / "copy")) == expected
        template = tmp_path / "copy/chat_template.jinja"
        template.write_text(template.read_text() + "x")
        assert tokenizer_hash(TextTokenizer(tmp_path / "copy")) != expected

    def test_one_without_a_serialized_form(self):
        class Reversed(NullTokenizer):
            def detokenize(self, ids, skip_special_tokens=True):
                return super().detokenize(ids)[::-1]

        assert tokenizer_hash(Reversed(50)) != tokenizer_hash(NullTokenizer(50)) == tokenizer_hash(NullTokenizer(50))


class TestWeights:
    @pytest.mark.parametrize("changed", [0, SAMPLE_BYTES, SAMPLES * SAMPLE_BYTES - 1])
    def test_small_files_are_read_whole(self, tmp_path, changed):
        size = SAMPLES * SAMPLE_BYTES
        expected = weights_hash(write(tmp_path / "a", size))
        assert weights_hash(write(tmp_path / "b", size)) == expected
        assert weights_hash(write(tmp_path / "c", size, changed)) != expected

    @pytest.mark.parametrize("changed", [0, SAMPLE_BYTES - 1, -1, -SAMPLE_BYTES])
    def test_large_files_are_sampled(self, tmp_path, monkeypatch, changed):
        """Reads of a file are bounded as documented, and include its beginning and its end."""
        size, read = 8 * SAMPLES * SAMPLE_BYTES, []
        original = identity.open_regular

        def counting(path):
            file = original(path)
            take = file.read

            class Counting:
                def __getattr__(self, name):
                    return getattr(file, name)

                def read(self, count):
                    read.append(count)
                    return take(count)

                def __enter__(self):
                    return self

                def __exit__(self, *_):
                    file.close()

            return Counting()

        monkeypatch.setattr(identity, "open_regular", counting)
        expected = weights_hash(write(tmp_path / "a", size))
        assert sum(read) == SAMPLES * SAMPLE_BYTES
        assert weights_hash(write(tmp_path / "b", size, changed)) != expected

    def test_names_and_sizes_count(self, tmp_path):
        one = write(tmp_path / "a", 10)
        expected = weights_hash(one)
        (one / "README.md").write_text("not weights")
        assert weights_hash(one) == expected
        (one / "model.safetensors").rename(one / "other.safetensors")
        assert weights_hash(one) != expected
        assert weights_hash(write(tmp_path / "b", 11)) != expected
