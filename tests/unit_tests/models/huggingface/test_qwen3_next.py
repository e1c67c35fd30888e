"""Imported Qwen3-Next checkpoints: layers, types, fields and files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_ext.config import SourceConfig
from megatron_ext.errors import CheckpointError, ConfigError
from megatron_ext.models.huggingface.hf_checkpoint import translate
from megatron_ext.models.load import load_model, save_model
from tests.priority import TestPriority
from tests.unit_tests.models.huggingface import nemotron_h_oracle as oracle
from tests.unit_tests.models.huggingface import qwen3_next_oracle
from tests.unit_tests.models.huggingface.families import excess, load_hf

pytestmark = pytest.mark.priority(TestPriority.HIGH)

NAMES = [shape.name for shape in qwen3_next_oracle.SHAPES]
CPU = torch.device("cpu")


def test_layers(qwens) -> None:
    """Each layer is two letters; experts where the two fields say so."""
    configs = {name: load_hf(qwens(name)[1]).config for name in NAMES}
    assert [config.hybrid_override_pattern for config in configs.values()] == [
        "M-M-M-*-", "*-M-M-", "MEMEME*E", "M-*EM-*-M-",
    ]  # fmt: skip
    dense = configs["dense"]
    assert (dense.recurrent_layer, dense.num_experts, dense.rotary_percent) == ("gated_delta_net", None, 0.25)


def test_imported_checkpoint_saved_and_loaded(qwens, tmp_path: Path) -> None:
    """--load-hf, --save, --load: the same configuration and the same logits."""
    imported = load_hf(qwens("experts")[1])
    save_model(tmp_path / "own", imported)
    loaded = load_model(SourceConfig(load=str(tmp_path / "own")), {}, device=CPU)
    assert loaded.config == imported.config
    tokens = oracle.prompt(65, seed=0)
    assert torch.equal(oracle.our_logits(loaded.model, tokens), oracle.our_logits(imported.model, tokens))


def test_sixteen_bits(qwens) -> None:
    """bf16 parameters, with no more rounding than theirs have."""
    (theirs, directory), tokens = qwens("dense"), oracle.prompt(65, seed=0)
    narrow = load_model(SourceConfig(load_hf=str(directory), bf16=True), {}, device=CPU)
    their_narrow = type(theirs).from_pretrained(directory, dtype=torch.bfloat16).eval()
    assert narrow.dtype is their_narrow.dtype is torch.bfloat16
    exact = oracle.their_logits(theirs, tokens)
    error = (oracle.our_logits(narrow.model, tokens).float() - exact).abs().mean()
    their_error = (oracle.their_logits(their_narrow, tokens).float() - exact).abs().mean()
    assert error < 1.2 * their_error


# Files and fields

FIELDS = qwen3_next_oracle._SMALL | {"model_type": "qwen3_next", "num_experts": 4, "rms_norm_eps": 1e-6}
FIELDS |= {"linear_conv_kernel_dim": 4}
REFUSED = {
    "attention_bias": (True, "attention_bias = True is not supported; supported is False"),
    "hidden_act": ("gelu", "hidden_act = 'gelu' is not supported"),
    "norm_topk_prob": (1, "norm_topk_prob = 1 is not supported; it must be true or false"),
    "num_experts_per_tok": (1, "num_experts_per_tok = 1 is not supported with num_experts = 4; supported are 2 to 4"),
    "layer_types": (
        ["linear_attention", "mamba"],
        "layer_types = .*'mamba'.* must be a list of linear_attention, full",
    ),
    "num_hidden_layers": (0, "num_hidden_layers = 0 is not supported"),
    "mlp_only_layers": ([7], r"mlp_only_layers = \[7\] is not supported; it must be a list of layers, 0 to 3"),
    "linear_num_value_heads": (3, "linear_num_key_heads = 2 is not supported; it must divide linear_num_value_heads"),
    "rope_scaling": ({"rope_type": "linear", "factor": 4.0}, "rope_scaling.rope_type = 'linear' is not supported"),
    "rope_parameters": ({"partial_rotary_factor": 2.0}, "rotary-percent 2.0"),
    "partial_rotary_factor": (0.5, "partial_rotary_factor 0.5 contradicts rope_parameters.partial_rotary_factor 0.25"),
    "quantization_config": ({"bits": 4}, "quantization_config = .* is not supported"),
    "sliding_window": (128, "sliding_window = 128 is not supported"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_fields_that_are_not_supported_are_refused(name: str) -> None:
    """Unsupported fields are refused by name, in one line."""
    value, message = REFUSED[name]
    translate(FIELDS)
    with pytest.raises(ConfigError, match=message) as caught:
        translate(FIELDS | {name: value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("share", ["", "a quarter", [], {"factor": 2}, True, -1, 0, 10**400, float("nan")], ids=repr)
def test_a_share_of_heads_that_is_none_is_one_line(share: object) -> None:
    """SE-1: outside of the objects as well as within."""
    for said in ({"partial_rotary_factor": share}, {"rope_parameters": {"partial_rotary_factor": share}}):
        with pytest.raises(ConfigError, match=r"partial_rotary_factor = .* it must be a positive number"):
            translate(FIELDS | said)


def test_older_files_and_their_missing_fields() -> None:
    """Published files say how often attention comes, and the share outside of any object."""
    older = {name: value for name, value in FIELDS.items() if name not in ("rope_parameters", "head_dim")}
    config = translate(older | {"full_attention_interval": 2, "rope_theta": 10_000_000, "partial_rotary_factor": 0.5})
    assert (config.hybrid_override_pattern, config.head_channels) == ("ME*EME*E", 256)
    assert (config.rotary_base, config.rotary_percent) == (10_000_000, 0.5)
    assert translate(older).rotary_percent == 0.25
    with pytest.raises(ConfigError, match="field num_experts is missing"):
        translate({name: value for name, value in older.items() if name != "num_experts"})


def test_tensors_for_predicting_ahead_are_passed_over(qwen_copy: Path, qwens) -> None:
    """Tensors for predicting ahead are ignored, as by transformers; any other unknown tensor is refused."""
    oracle.edit_weights(qwen_copy, lambda t: t.update({"mtp.fc.weight": torch.ones(3)}))
    assert excess(load_hf(qwen_copy).model, qwens("experts")[0]) <= 1
    oracle.edit_weights(qwen_copy, lambda t: t.update({"model.layers.0.linear_attn.D": torch.ones(3)}))
    with pytest.raises(CheckpointError, match=r"has unexpected layers\.0\.linear_attn\.D"):
        load_hf(qwen_copy)


def test_a_tensor_of_another_shape_is_named(qwen_copy: Path) -> None:
    name = "model.layers.0.linear_attn.in_proj_ba.weight"
    oracle.edit_weights(qwen_copy, lambda t: t.update({name: torch.ones(9, 32)}))
    with pytest.raises(CheckpointError, match=r"in_proj_ba.weight has shape \(9, 32\).*requires \(8, 32\)"):
        load_hf(qwen_copy)
