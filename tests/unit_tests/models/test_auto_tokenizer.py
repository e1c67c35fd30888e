"""OB-3: transformers' `AutoTokenizer` opens directories of ours, as load generators open `root` of `/v1/models`."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from megatron_ext.config import SourceConfig
from megatron_ext.config.differences import EMBEDDED_MODEL_DIR
from megatron_ext.models.load import LoadedModel, load_model, save_model
from megatron_ext.server.run import readable_root
from megatron_ext.text.tokenizer import NullTokenizer, TextTokenizer

TEXT = "The import statement, 1 + 1\n    <|endoftext|>"


@pytest.fixture(params=["embedded", "saved", "saved from a bare file"])
def directory(request, tmp_path, tiny_model, tiny_config) -> Path:
    if request.param == "embedded":
        return EMBEDDED_MODEL_DIR
    source = EMBEDDED_MODEL_DIR
    if "bare" in request.param:
        source = tmp_path / "tokenizer.json"
        shutil.copy(EMBEDDED_MODEL_DIR / "tokenizer.json", source)
    loaded = LoadedModel(tiny_model, tiny_config, TextTokenizer(source), torch.float32, "tiny")
    save_model(tmp_path / "saved", loaded)
    return tmp_path / "saved"


def test_equal_ids(directory):
    """Ids and the end token equal ours."""
    ours, theirs = TextTokenizer(directory), AutoTokenizer.from_pretrained(directory, local_files_only=True)
    assert theirs(TEXT)["input_ids"] == ours.tokenize(TEXT)
    assert (theirs.eos_token_id, theirs.bos_token_id) == (ours.eod, ours.bos) == (0, None)


def test_the_root_is_such_a_directory():
    loaded = load_model(SourceConfig(), {})
    assert AutoTokenizer.from_pretrained(readable_root(loaded)).eos_token == "<|endoftext|>"
    null = LoadedModel(loaded.model, loaded.config, NullTokenizer(4096), torch.float32, "random weights, M")
    assert readable_root(null) == "random weights, M"
