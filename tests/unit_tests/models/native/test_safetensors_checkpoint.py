"""Our own checkpoints come back as they were, and whatever does not fit is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from megatron_ext import __version__
from megatron_ext.config import ModelConfig
from megatron_ext.errors import CheckpointError, ConfigError
from megatron_ext.models.build import build_model
from megatron_ext.models.native import safetensors_checkpoint
from megatron_ext.models.native.directory import DIGEST_FILE
from megatron_ext.models.native.safetensors_checkpoint import load_checkpoint, read_header, save_checkpoint
from tests.unit_tests.models.huggingface import nemotron_h_oracle as oracle

CPU = torch.device("cpu")


@pytest.fixture
def saved(tiny_model: nn.Module, tiny_config: ModelConfig, tmp_path: Path) -> Path:
    """A checkpoint that a test may spoil."""
    save_checkpoint(tmp_path / "checkpoint", tiny_model, tiny_config)
    return tmp_path / "checkpoint"


def same_parameters(one: nn.Module, other: nn.Module) -> bool:
    first, second = dict(one.named_parameters()), dict(other.named_parameters())
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_round_trip(saved: Path, tiny_model: nn.Module, tiny_config: ModelConfig) -> None:
    model, config = load_checkpoint(saved, device=CPU)
    assert config == tiny_config
    assert same_parameters(model, tiny_model)
    tokens = oracle.prompt(40, seed=0, vocab_size=50)
    assert torch.equal(oracle.our_logits(model, tokens), oracle.our_logits(tiny_model, tokens))
    assert not model.training


def test_contents_of_the_files(saved: Path, tiny_config: ModelConfig) -> None:
    assert sorted(path.name for path in saved.iterdir()) == ["config.json", "model.safetensors"]
    header = json.loads((saved / "config.json").read_text())
    assert (header["format"], header["format_version"], header["dtype"]) == ("megatron_ext", 1, "float32")
    assert header["package_version"] == __version__
    assert header["model"]["hidden_size"] == tiny_config.hidden_size
    assert [path.name for path in saved.parent.iterdir()] == ["checkpoint"], "nothing temporary is left"


@pytest.mark.parametrize(
    "changes",
    [
        {"untie_embeddings_and_output_weights": True},
        {"position_embedding_type": "learned_absolute"},
        {"normalization": "LayerNorm", "disable_bias_linear": False, "swiglu": True, "squared_relu": False},
        {"hybrid_override_pattern": "*-*", "position_embedding_type": "rope"},
        {"spec": ("megatron_ext.mcore.layer_specs", "hybrid_stack_spec"), "norm_epsilon": 1e-6},
    ],
    ids=str,
)
def test_round_trip_of_other_architectures(changes: dict, tiny_config: ModelConfig, tmp_path: Path) -> None:
    config = ModelConfig(**(tiny_config.to_dict() | changes))
    model = build_model(config, device=CPU, seed=3)
    save_checkpoint(tmp_path, model, config)
    loaded, loaded_config = load_checkpoint(tmp_path, device=CPU)
    assert loaded_config == config
    assert same_parameters(loaded, model)


def test_sixteen_bits_keep_the_decays(tiny_model: nn.Module, tiny_config: ModelConfig, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, tiny_model, tiny_config, dtype=torch.bfloat16)
    assert read_header(tmp_path).dtype == "bf16"
    loaded, original = (dict(m.named_parameters()) for m in (load_checkpoint(tmp_path, device=CPU)[0], tiny_model))
    for name in ("A_log", "dt_bias", "D"):
        name = f"decoder.layers.0.mixer.{name}"
        assert torch.equal(loaded[name], original[name])
    name = "decoder.layers.0.mixer.in_proj.weight"
    assert torch.equal(loaded[name], original[name].bfloat16().float())
    assert not torch.equal(loaded[name], original[name])


SPOILED_WEIGHTS = {
    "lacks decoder.layers.0.mixer.D": lambda t: t.pop("decoder.layers.0.mixer.D"),
    "has unexpected decoder.layers.9.norm.weight": lambda t: t.update({"decoder.layers.9.norm.weight": torch.ones(1)}),
    "lacks decoder.final_norm.weight and has unexpected final_norm.weight": lambda t: t.update(
        {"final_norm.weight": t.pop("decoder.final_norm.weight")}
    ),
    r"decoder.final_norm.weight has shape \(16,\), and the configuration requires \(32,\)": lambda t: t.update(
        {"decoder.final_norm.weight": torch.ones(16)}
    ),
}


@pytest.mark.parametrize("message", SPOILED_WEIGHTS)
def test_weights_that_do_not_fit(message: str, saved: Path) -> None:
    oracle.edit_weights(saved, SPOILED_WEIGHTS[message])
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(saved, device=CPU)


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
        ({"dtype": "fp8"}, "dtype 'fp8'; one of float32, bfloat16, float16"),
        ({"dtype": ["fp32"]}, r"dtype \['fp32'\]; one of float32, bfloat16, float16"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_configurations_that_do_not_fit(changes: dict, message: str, saved: Path) -> None:
    oracle.edit_config(saved, **changes)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_checkpoint(saved, device=CPU)
    assert "\n" not in str(caught.value)


def test_missing_parts(saved: Path) -> None:
    (saved / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"has neither model\.safetensors"):
        load_checkpoint(saved, device=CPU)
    (saved / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        load_checkpoint(saved, device=CPU)


def test_older_checkpoint_is_replaced_whole(saved: Path, tiny_config: ModelConfig) -> None:
    (saved / "tokenizer.json").write_text("{}")
    (saved / DIGEST_FILE).write_text("{}")
    other = build_model(tiny_config, device=CPU, seed=8)
    save_checkpoint(saved, other, tiny_config)
    assert same_parameters(load_checkpoint(saved, device=CPU)[0], other)
    assert not (saved / "tokenizer.json").exists(), "the old checkpoint's tokenizer is gone with it"
    assert not (saved / DIGEST_FILE).exists(), "it is that of other weights"
    assert [path.name for path in saved.parent.iterdir()] == ["checkpoint"]


@pytest.mark.parametrize("name", ["notes.txt", "config.json"])
def test_other_directories_are_not_overwritten(
    name: str, tiny_model: nn.Module, tiny_config: ModelConfig, tmp_path: Path
) -> None:
    (tmp_path / name).write_text('{"model_type": "nemotron_h"}')
    with pytest.raises(ConfigError, match="is not overwritten"):
        save_checkpoint(tmp_path, tiny_model, tiny_config)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_file_in_a_checkpoint_is_not_deleted(saved: Path, tiny_model: nn.Module, tiny_config: ModelConfig) -> None:
    (saved / "notes.txt").write_text("keep me")
    with pytest.raises(ConfigError, match=r"it holds notes\.txt"):
        save_checkpoint(saved, tiny_model, tiny_config)


def test_places_that_cannot_be_written(tiny_model: nn.Module, tiny_config: ModelConfig, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        save_checkpoint(tmp_path / "file", tiny_model, tiny_config)
    with pytest.raises(ConfigError, match="cannot be written"):
        save_checkpoint(tmp_path / "file" / "below", tiny_model, tiny_config)


def test_failed_save_leaves_the_old_checkpoint(
    saved: Path, tiny_model: nn.Module, tiny_config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("no space left on device")

    before = (saved / "model.safetensors").read_bytes()
    monkeypatch.setattr(safetensors_checkpoint, "save_file", fail)
    with pytest.raises(ConfigError, match="no space left on device"):
        save_checkpoint(saved, tiny_model, tiny_config)
    assert (saved / "model.safetensors").read_bytes() == before
    assert [path.name for path in saved.parent.iterdir()] == ["checkpoint"]


def test_a_new_checkpoint_that_cannot_take_its_place_leaves_the_old_one(
    saved: Path, tiny_model: nn.Module, tiny_config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TE-6: the old checkpoint stays, even if the failure comes after it was moved aside."""
    rename = Path.rename

    def fail_for_the_new_one(path: Path, target: Path) -> Path:
        if path.name == "new":
            raise OSError("planted")
        return rename(path, target)

    before = (saved / "model.safetensors").read_bytes()
    monkeypatch.setattr(Path, "rename", fail_for_the_new_one)
    with pytest.raises(ConfigError, match="planted"):
        save_checkpoint(saved, tiny_model, tiny_config)
    assert (saved / "model.safetensors").read_bytes() == before
    assert [path.name for path in saved.parent.iterdir()] == ["checkpoint"]
