"""PY-8: Hugging Face -> distributed checkpoint -> Hugging Face, bitwise; for every family that is supported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_ext.config import SourceConfig
from megatron_ext.errors import CheckpointError, ConfigError
from megatron_ext.models.huggingface import family_registry
from megatron_ext.models.huggingface.export import export_hf_checkpoint
from megatron_ext.models.load import load_model, save_model
from megatron_ext.models.weight_files import WEIGHTS_FILE
from tests.on_request import long_except
from tests.unit_tests.models.huggingface.families import EVERY_SHAPE, FAMILIES

CPU = torch.device("cpu")
NULL = {"tokenizer_type": "NullTokenizer"}
WHOLE = [(fixture, name) for fixture, name in EVERY_SHAPE if "images" not in name]  # what reads those is left out
LAST = {
    getattr(shape, "family", getattr(shape, "model_type", fixture)): (fixture, shape.name)
    for fixture, family in FAMILIES.items()
    for shape in family.module.SHAPES
}
"""Of each family the last shape."""


def hf_tensors(directory: Path) -> dict[str, torch.Tensor]:
    return {name: one for file in sorted(directory.glob("*.safetensors")) for name, one in load_file(file).items()}


def assert_same_files(found: Path, expected: Path) -> None:
    ours, theirs = hf_tensors(found), hf_tensors(expected)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), name
    assert (found / "config.json").read_bytes() == (expected / "config.json").read_bytes()


def converted(source: Path, scratch: Path, **flags: bool) -> Path:
    """There and back: what was loaded from files of Megatron's form, in the form that it had."""
    imported = load_model(SourceConfig(load_hf=str(source), **NULL, **flags), {}, device=CPU)
    save_model(scratch / "megatron", imported)
    loaded = load_model(SourceConfig(load=str(scratch / "megatron"), **NULL, **flags), {}, device=CPU)
    assert loaded.config == imported.config
    export_hf_checkpoint(scratch / "back", loaded.model, loaded.config, source)
    return scratch / "back"


def test_all_families_are_covered(request):
    """PY-8: a family that is added is converted here, or this fails."""
    directories = [request.getfixturevalue(fixture)(name)[1] for fixture, name in LAST.values()]
    covered = {json.loads((directory / "config.json").read_text())["model_type"] for directory in directories}
    assert covered == set(family_registry.FAMILIES)


@pytest.mark.parametrize(("fixture", "name"), long_except(LAST.values(), WHOLE), ids=[" ".join(one) for one in WHOLE])
def test_there_and_back(fixture, name, request, tmp_path):
    """PY-8: every tensor under its name, in its type, bit for bit."""
    source = request.getfixturevalue(fixture)(name)[1]
    assert_same_files(converted(source, tmp_path), source)


def test_in_16_bits(llamas, tmp_path):
    """PY-8: a checkpoint in bf16 comes back in bf16, from weights in fp32 as from weights in bf16."""
    source = shutil.copytree(llamas("mha")[1], tmp_path / "hf")
    save_file({name: one.bfloat16() for name, one in hf_tensors(source).items()}, source / WEIGHTS_FILE)
    for flags in ({}, {"bf16": True}):
        assert_same_files(converted(source, tmp_path / str(flags), **flags), source)


def test_other_weights_are_written(llama_copy, tmp_path):
    """The control: it is the model that is written, not the example."""
    loaded = load_model(SourceConfig(load_hf=str(llama_copy), **NULL), {}, device=CPU)
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.add_(1.0)
    export_hf_checkpoint(tmp_path / "new", loaded.model, loaded.config, llama_copy)
    old, new = hf_tensors(llama_copy), hf_tensors(tmp_path / "new")
    assert all(torch.equal(new[name], old[name] + 1.0) for name in old)


class TestRefused:
    """Refusals come before anything is written."""

    def export(self, source: Path, target: Path, like: Path) -> None:
        loaded = load_model(SourceConfig(load_hf=str(source), **NULL), {}, device=CPU)
        export_hf_checkpoint(target, loaded.model, loaded.config, like)

    def test_something_is_there(self, llama_copy, tmp_path):
        (tmp_path / "full").mkdir()
        (tmp_path / "full" / "file").touch()
        with pytest.raises(ConfigError, match="full is not overwritten; give a new or empty directory"):
            self.export(llama_copy, tmp_path / "full", llama_copy)
        (tmp_path / "empty").mkdir()
        self.export(llama_copy, tmp_path / "empty", llama_copy)

    def test_another_architecture(self, llama_copy, llamas, tmp_path):
        with pytest.raises(
            ConfigError, match="is of another architecture: group_query_attention is True there, and False in the model"
        ):
            self.export(llama_copy, tmp_path / "new", llamas("gqa, tied")[1])
        assert not (tmp_path / "new").exists()

    def test_an_example_with_too_little_or_too_much(self, llama_copy, tmp_path):
        loaded = load_model(SourceConfig(load_hf=str(llama_copy), **NULL), {}, device=CPU)
        tensors = hf_tensors(llama_copy)
        norm = tensors.pop("model.norm.weight")
        for file in llama_copy.glob("*.safetensors"):
            file.unlink()
        save_file(tensors, llama_copy / WEIGHTS_FILE)
        with pytest.raises(CheckpointError, match=r"has no norm.weight, which the model has"):
            export_hf_checkpoint(tmp_path / "new", loaded.model, loaded.config, llama_copy)
        save_file(tensors | {"model.norm.weight": norm, "model.extra": norm.clone()}, llama_copy / WEIGHTS_FILE)
        with pytest.raises(CheckpointError, match=r"has model.extra, which the model lacks"):
            export_hf_checkpoint(tmp_path / "new", loaded.model, loaded.config, llama_copy)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["llama"]

    def test_logs_tensors_that_are_not_loaded(self, llama_copy, tmp_path, caplog):
        tensors = hf_tensors(llama_copy)
        name = "model.layers.0.self_attn.rotary_emb.inv_freq"
        save_file(tensors | {name: torch.ones(4)}, llama_copy / WEIGHTS_FILE)
        self.export(llama_copy, tmp_path / "new", llama_copy)
        assert f"has {name}, which is not loaded and therefore not written" in caplog.text
        assert name not in hf_tensors(tmp_path / "new")


def test_transformers_reads_it(llamas, tmp_path):
    """PY-8: transformers reads the files and computes equal outputs."""
    theirs, source = llamas("mha")
    back = converted(source, tmp_path)
    again = type(theirs).from_pretrained(back)
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, theirs(tokens).logits)
    assert json.loads((back / "config.json").read_text())["model_type"] == "llama"
