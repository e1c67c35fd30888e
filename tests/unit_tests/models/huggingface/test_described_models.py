"""PY-8: models written as NemotronH without an example come back equal, and transformers computes what we do."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, NemotronHForCausalLM

from megatron_ext.config import ModelConfig, SourceConfig
from megatron_ext.errors import ConfigError
from megatron_ext.models.build import build_model
from megatron_ext.models.huggingface.export import save_hf_checkpoint
from megatron_ext.models.load import LoadedModel, load_model
from megatron_ext.models.weight_files import WEIGHTS_FILE
from tests.on_request import long_except
from tests.unit_tests.models.huggingface import nemotron_h_oracle as oracle
from tests.unit_tests.models.huggingface.families import CPU, excess, load_hf
from tests.unit_tests.support.prediction import prediction_logits

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
def test_there_and_back(is_untied: bool, prediction: dict, tiny_config: ModelConfig, tmp_path: Path) -> None:
    """Every tensor bit for bit, sizes that follow from others, equal logits of trunk and prediction layer."""
    config = dataclasses.replace(tiny_config, untie_embeddings_and_output_weights=is_untied, **prediction)
    model = build_model(config, device=CPU, seed=5)
    save_hf_checkpoint(tmp_path / "hf", model, config)
    assert_equal(loaded_from(tmp_path / "hf"), model, config)
    names = load_file(tmp_path / "hf" / WEIGHTS_FILE).keys()
    assert {name.split(".")[0] for name in names} == {"backbone", "lm_head", *(["mtp"] if prediction else [])}
    served = load_hf(tmp_path / "hf")
    assert (served.model.mtp, served.config.mtp_num_layers) == (None, None)


@pytest.mark.parametrize(
    "name", long_except([oracle.SHAPES[0].name, oracle.SHAPES[-1].name], [shape.name for shape in oracle.SHAPES])
)
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


def test_sixteen_bits(oracles, tmp_path: Path) -> None:
    """Decays and the router's bias stay in fp32, as in Megatron's form."""
    ours = load_hf(oracles("MoE")[1])
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
