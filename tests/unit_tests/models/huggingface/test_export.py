"""PY-8: Hugging Face -> distributed checkpoint -> Hugging Face, bitwise; NemotronH without an example."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, LlamaForCausalLM, NemotronHForCausalLM

from megatron_ext.config import ModelConfig, SourceConfig
from megatron_ext.errors import CheckpointError, ConfigError
from megatron_ext.models.build import build_model
from megatron_ext.models.huggingface.export import export_hf_checkpoint, save_hf_checkpoint
from megatron_ext.models.huggingface.family_registry import FAMILIES
from megatron_ext.models.load import LoadedModel, load_model, save_model
from megatron_ext.models.weight_files import WEIGHTS_FILE
from tests.on_request import long_except
from tests.unit_tests.models.huggingface import oracles as oracle
from tests.unit_tests.models.huggingface.oracles import CPU, LAST, NULL, SHAPES, WHOLE, excess, load_hf
from tests.unit_tests.support.prediction import prediction_logits


def assert_same_files(found: Path, expected: Path) -> None:
    ours, theirs = load_file(found / WEIGHTS_FILE), load_file(expected / WEIGHTS_FILE)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), name
    assert (found / "config.json").read_bytes() == (expected / "config.json").read_bytes()


def converted(source: Path, scratch: Path, **flags: bool) -> Path:
    """There and back: what was loaded from files of Megatron's form, in the form that it had."""
    imported = load_hf(source, **flags)
    save_model(scratch / "megatron", imported)
    loaded = load_model(SourceConfig(load=str(scratch / "megatron"), **NULL, **flags), {}, device=CPU)
    assert loaded.config == imported.config
    export_hf_checkpoint(scratch / "back", loaded.model, loaded.config, source)
    return scratch / "back"


def test_all_families_are_covered():
    """PY-8: a family that is added is converted here, or this fails."""
    assert LAST.keys() == FAMILIES.keys()


@pytest.mark.parametrize("name", long_except([one for one in LAST.values() if one in WHOLE], WHOLE))
def test_there_and_back(name, oracles, tmp_path):
    """PY-8: every tensor under its name, in its type, bit for bit."""
    assert_same_files(converted(oracles(name)[1], tmp_path), oracles(name)[1])


def test_in_16_bits(llama_copy, tmp_path):
    """PY-8: a checkpoint in bf16 comes back in bf16, from weights in fp32 as from weights in bf16."""
    oracle.edit_weights(llama_copy, lambda t: t.update({name: one.bfloat16() for name, one in t.items()}))
    for flags in ({}, {"bf16": True}):
        assert_same_files(converted(llama_copy, tmp_path / str(flags), **flags), llama_copy)


def test_other_weights_are_written(llama_copy, tmp_path):
    """The control: it is the model that is written, not the example; transformers reads the files."""
    loaded = load_hf(llama_copy)
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.mul_(1.5)
    export_hf_checkpoint(tmp_path / "new", loaded.model, loaded.config, llama_copy)
    old, new = load_file(llama_copy / WEIGHTS_FILE), load_file(tmp_path / "new" / WEIGHTS_FILE)
    assert all(torch.equal(new[name], old[name] * 1.5) for name in old)
    theirs = LlamaForCausalLM.from_pretrained(tmp_path / "new", dtype=torch.float32).eval()
    assert excess(loaded.model, theirs) <= 1


class TestRefused:
    """Refusals come before anything is written."""

    def export(self, source: Path, target: Path, like: Path) -> None:
        loaded = load_hf(source)
        export_hf_checkpoint(target, loaded.model, loaded.config, like)

    def test_something_is_there(self, llama_copy, tmp_path):
        (tmp_path / "full").mkdir()
        (tmp_path / "full" / "file").touch()
        with pytest.raises(ConfigError, match="full is not overwritten; give a new or empty directory"):
            self.export(llama_copy, tmp_path / "full", llama_copy)
        (tmp_path / "empty").mkdir()
        self.export(llama_copy, tmp_path / "empty", llama_copy)

    def test_another_architecture(self, llama_copy, oracles, tmp_path):
        with pytest.raises(ConfigError, match=r"is of another architecture: norm_epsilon is 0\.01 there"):
            self.export(llama_copy, tmp_path / "new", oracles("llama, tied")[1])
        assert not (tmp_path / "new").exists()

    def test_an_example_with_too_little_or_too_much(self, llama_copy, tmp_path):
        loaded = load_hf(llama_copy)
        tensors = load_file(llama_copy / WEIGHTS_FILE)
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
        tensors = load_file(llama_copy / WEIGHTS_FILE)
        name = "model.layers.0.self_attn.rotary_emb.inv_freq"
        save_file(tensors | {name: torch.ones(4)}, llama_copy / WEIGHTS_FILE)
        self.export(llama_copy, tmp_path / "new", llama_copy)
        assert f"has {name}, which is not loaded and therefore not written" in caplog.text
        assert name not in load_file(tmp_path / "new" / WEIGHTS_FILE)


# NemotronH without an example

PREDICTION = {"mtp_num_layers": 1, "mtp_hybrid_override_pattern": "*-"}


def loaded_from(directory: Path) -> LoadedModel:
    """A checkpoint with all that it has."""
    return load_model(SourceConfig(load_hf=str(directory)), {}, device=CPU, reads_prediction=True)


def assert_equal(found: LoadedModel, model: nn.Module, config: ModelConfig) -> None:
    assert found.config.resolved() == config.resolved()
    ours, theirs = found.model.state_dict(), model.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert tensor is None or torch.equal(ours[name], tensor), name
    tokens = torch.tensor([oracle.prompt(40, seed=1, vocab_size=50)])
    assert torch.equal(oracle.our_logits(found.model, tokens[0].tolist()), oracle.our_logits(model, tokens[0].tolist()))
    if config.mtp_num_layers:
        depths = zip(prediction_logits(found.model, tokens, 2), prediction_logits(model, tokens, 2), strict=True)
        assert all(torch.equal(one, other) for one, other in depths)


@pytest.mark.parametrize(
    "prediction",
    [{}, PREDICTION, PREDICTION | {"mtp_num_layers": 3, "mtp_use_repeated_layer": True}],
    ids=["alone", "prediction", "repeated"],
)
@pytest.mark.parametrize("is_untied", [False, True], ids=["tied", "untied"])
def test_described_there_and_back(is_untied: bool, prediction: dict, tiny_config: ModelConfig, tmp_path: Path) -> None:
    """Every tensor bit for bit, sizes that follow from others, equal logits of trunk and prediction layer."""
    config = dataclasses.replace(tiny_config, untie_embeddings_and_output_weights=is_untied, **prediction)
    model = build_model(config, device=CPU, seed=5)
    save_hf_checkpoint(tmp_path / "hf", model, config)
    assert_equal(loaded_from(tmp_path / "hf"), model, config)
    names = load_file(tmp_path / "hf" / WEIGHTS_FILE).keys()
    assert {name.split(".")[0] for name in names} == {"backbone", "lm_head", *(["mtp"] if prediction else [])}
    served = load_hf(tmp_path / "hf")
    assert (served.model.mtp, served.config.mtp_num_layers) == (None, None)


NEMOTRONS = [name for name, shape in SHAPES.items() if shape.model_type == "nemotron_h"]


@pytest.mark.parametrize("name", long_except([NEMOTRONS[0], NEMOTRONS[-1]], NEMOTRONS))
def test_transformers_computes_the_same(name: str, oracles, tmp_path: Path) -> None:
    """FA-1: it reads the fields and the names of every shape, experts among them, and clamps no step size."""
    ours = load_hf(oracles(name)[1])
    with torch.no_grad():
        for parameter in (one for key, one in ours.model.named_parameters() if key.endswith("dt_bias")):
            parameter.sub_(4.0)  # steps below 0.001
    save_hf_checkpoint(tmp_path / "hf", ours.model, ours.config)
    assert_equal(load_hf(tmp_path / "hf"), ours.model, ours.config)
    theirs = NemotronHForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    assert excess(ours.model, theirs) <= 1


def test_transformers_reads_the_prediction_layer(tiny_config: ModelConfig, tmp_path: Path) -> None:
    config = dataclasses.replace(tiny_config, **PREDICTION)
    save_hf_checkpoint(tmp_path / "hf", build_model(config, device=CPU), config)
    theirs = AutoConfig.from_pretrained(tmp_path / "hf")
    assert (theirs.num_nextn_predict_layers, theirs.mtp_hybrid_override_pattern) == (1, "*-")
    assert (theirs.num_hidden_layers, theirs.hybrid_override_pattern) == (3, "M*-")


def test_decays_stay_in_32_bits(oracles, tmp_path: Path) -> None:
    """Decays and the router's bias stay in fp32, as in Megatron's form."""
    ours = load_hf(oracles("nemotron MoE")[1])
    save_hf_checkpoint(tmp_path, ours.model, ours.config, dtype=torch.bfloat16)
    wide = {"A_log", "dt_bias", "D", "e_score_correction_bias"}
    for name, tensor in load_file(tmp_path / WEIGHTS_FILE).items():
        assert tensor.dtype is (torch.float32 if name.rsplit(".", 1)[-1] in wide else torch.bfloat16), name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"squared_relu": False}, "squared_relu is False, and a nemotron_h would have True"),
        ({"squared_relu": False, "swiglu": True}, "squared_relu is False"),
        ({"position_embedding_type": "rope"}, "position_embedding_type is 'rope'"),
        ({"mamba_gated_norm": "norm_first"}, "mamba_gated_norm is 'norm_first'"),
        ({"hybrid_override_pattern": "MW-", "attention_window": 8}, "hybrid_override_pattern 'MW-' is not supported"),
        (PREDICTION | {"mtp_num_layers": 2}, "num_nextn_predict_layers = 2 is not supported"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_other_models_are_refused(changes: dict, message: str, tiny_config: ModelConfig, tmp_path: Path) -> None:
    """The error names the form that has every model; nothing is written."""
    config = dataclasses.replace(tiny_config, **changes)
    with pytest.raises(ConfigError, match=f"{message}.*torch_dist, --save") as caught:
        save_hf_checkpoint(tmp_path / "hf", build_model(config, device=CPU), config)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []
