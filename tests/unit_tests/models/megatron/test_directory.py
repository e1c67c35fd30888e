"""Header of our own checkpoints, and places that they are saved to: whatever does not fit is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch import nn

from megatron_ext import __version__
from megatron_ext.config import ModelConfig, SourceConfig
from megatron_ext.errors import CheckpointError, ConfigError
from megatron_ext.models.load import load_model
from megatron_ext.models.megatron.directory import read_header
from megatron_ext.models.megatron.dist_checkpoint import save_dist_checkpoint
from tests.unit_tests.models.huggingface import nemotron_h_oracle as oracle


@pytest.fixture
def saved(tiny_model: nn.Module, tiny_config: ModelConfig, tmp_path: Path) -> Path:
    """A checkpoint that a test may spoil."""
    save_dist_checkpoint(tmp_path / "checkpoint", tiny_model, tiny_config)
    return tmp_path / "checkpoint"


def test_contents_of_the_files(saved: Path, tiny_config: ModelConfig) -> None:
    header = json.loads((saved / "config.json").read_text())
    assert (header["format"], header["format_version"], header["dtype"]) == ("megatron_ext", 1, "float32")
    assert header["package_version"] == __version__
    assert header["model"]["hidden_size"] == tiny_config.hidden_size


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"hidden_size": 32, "colour": "red"}}, "unknown model field colour"),
        ({"model": {"hidden_size": "32"}}, "hidden_size = '32'; it must be of type int"),
        ({"model": {"swiglu": 1}}, "swiglu = 1; it must be of type bool"),
        ({"model": {"spec": ["one"]}}, r"spec = \['one'\]"),
        ({"model": {"hidden_size": 0}}, r"config\.json: .*0 must be positive"),
        ({"model": None}, "has no model configuration"),
        ({"colour": "red"}, "unknown field colour"),
        ({"format": "other"}, "not of format 'megatron_ext' but 'other'"),
        ({"format": None, "model_type": "nemotron_h"}, "Hugging Face checkpoint, try --load-hf"),
        ({"format_version": 2}, "format version 2; this package reads version 1"),
        ({"format_version": 0}, "format version 0; this package reads version 1"),
        ({"format_version": None}, "format version None; this package reads version 1"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_configurations_that_do_not_fit(changes: dict, message: str, saved: Path) -> None:
    oracle.edit_config(saved, **changes)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_header(saved)
    assert "\n" not in str(caught.value)


def test_directories_without_megatrons_files(saved: Path) -> None:
    """The form that versions up to 0.2 had besides: one line says which version converts it."""
    for file in ("metadata.json", ".metadata", "__0_0.distcp", "common.pt"):
        (saved / file).unlink()
    source = SourceConfig(load=str(saved))
    with pytest.raises(CheckpointError, match=r"has no metadata\.json"):
        load_model(source, {})
    (saved / "model.safetensors").touch()
    line = f"up to version 0.2, which converts it: megatron-ext run --load {saved} --save NEW"
    with pytest.raises(CheckpointError, match=line) as caught:
        load_model(source, {})
    assert "\n" not in str(caught.value)
    (saved / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        load_model(source, {})


@pytest.mark.parametrize("name", ["notes.txt", "config.json"])
def test_other_directories_are_not_overwritten(
    name: str, tiny_model: nn.Module, tiny_config: ModelConfig, tmp_path: Path
) -> None:
    (tmp_path / name).write_text('{"model_type": "nemotron_h"}')
    with pytest.raises(ConfigError, match="is not overwritten"):
        save_dist_checkpoint(tmp_path, tiny_model, tiny_config)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_places_that_cannot_be_written(tiny_model: nn.Module, tiny_config: ModelConfig, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        save_dist_checkpoint(tmp_path / "file", tiny_model, tiny_config)
    with pytest.raises(ConfigError, match="cannot be written"):
        save_dist_checkpoint(tmp_path / "file" / "below", tiny_model, tiny_config)


def test_a_new_checkpoint_that_cannot_take_its_place_leaves_the_old_one(
    saved: Path, tiny_model: nn.Module, tiny_config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TE-6: the old checkpoint stays, even if the failure comes after it was moved aside."""
    rename = Path.rename

    def fail_for_the_new_one(path: Path, target: Path) -> Path:
        if path.name == "new":
            raise OSError("planted")
        return rename(path, target)

    before = (saved / "__0_0.distcp").read_bytes()
    monkeypatch.setattr(Path, "rename", fail_for_the_new_one)
    with pytest.raises(ConfigError, match="planted"):
        save_dist_checkpoint(saved, tiny_model, tiny_config)
    assert (saved / "__0_0.distcp").read_bytes() == before
    assert [path.name for path in saved.parent.iterdir()] == ["checkpoint"]
