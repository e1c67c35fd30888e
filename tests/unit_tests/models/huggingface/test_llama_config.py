"""A Llama `config.json` is translated whole, or refused by the name of the field."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import LlamaConfig

from megatron_ext.errors import ConfigError
from megatron_ext.models.huggingface.hf_checkpoint import read_hf_config, translate

# As published: Llama 2 (7B), Llama 3 (8B).
LLAMA_2 = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 3,
    "num_key_value_heads": 32,
    "pad_token_id": 0,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.31.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
LLAMA_3 = LLAMA_2 | {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128009],
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "num_key_value_heads": 8,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
SCALED = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

SCALED_3 = SCALED | {"rope_type": "llama3"}


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("factor", [8.0, 32])
def test_scaling_of_llama_3_1(name: str, factor: float) -> None:
    """Scaling of the published 3.1 (8) and 3.2 (32) configurations."""
    config = translate(LLAMA_3 | {name: SCALED_3 | {"factor": factor}, "max_position_embeddings": 131072})
    assert (config.use_rope_scaling, config.rope_scaling_factor, config.rotary_base) == (True, factor, 500000)
    assert not translate(LLAMA_3).use_rope_scaling


def test_published_configurations() -> None:
    older, newer = translate(LLAMA_2), translate(LLAMA_3)
    assert older.hybrid_override_pattern == newer.hybrid_override_pattern == "*-*-*-"
    assert (older.hidden_size, older.ffn_size, newer.ffn_size) == (4096, 11008, 14336)
    assert (older.num_attention_heads, older.query_groups, newer.query_groups) == (32, 32, 8)
    assert (older.head_channels, older.vocab_size, newer.vocab_size) == (128, 32000, 128256)
    assert (older.rotary_base, newer.rotary_base, newer.rotary_percent) == (10000, 500000, 1.0)
    assert (older.max_position_embeddings, newer.max_position_embeddings) == (4096, 8192)
    assert (newer.swiglu, newer.squared_relu, newer.disable_bias_linear) == (True, False, True)
    assert (newer.normalization, newer.norm_epsilon) == ("RMSNorm", 1e-5)
    assert newer.position_embedding_type == "rope"
    assert newer.untie_embeddings_and_output_weights
    assert not translate(LLAMA_3 | {"tie_word_embeddings": True}).untie_embeddings_and_output_weights


def test_missing_fields_of_older_files() -> None:
    """The first files have neither groups nor a base; some have no epsilon."""
    needless = ("num_key_value_heads", "rope_scaling", "pretraining_tp", "tie_word_embeddings", "rms_norm_eps")
    config = translate({name: value for name, value in LLAMA_2.items() if name not in needless})
    assert (config.query_groups, config.rotary_base, config.norm_epsilon) == (32, 10000, 1e-6)
    assert config.untie_embeddings_and_output_weights


def test_head_size_of_its_own() -> None:
    assert translate(LLAMA_3 | {"head_dim": 64}).head_channels == 64
    assert translate(LLAMA_3 | {"head_dim": None, "num_key_value_heads": None}).head_channels == 128
    assert translate(LLAMA_3 | {"head_dim": 128, "num_attention_heads": 24}).head_channels == 128


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 500000},
        {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 500000.0, "partial_rotary_factor": 1.0}, "rope_theta": 500000.0},
        {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "default"}},
        {"rope_theta": 500000.0, "rope_scaling": {"type": "default"}},
        {"rope_theta": 500000.0, "rope_scaling": {}},
        {"rope_theta": None, "rope_parameters": {"rope_theta": 500000.0}, "rope_scaling": {"rope_theta": 500000.0}},
    ],
    ids=str,
)
def test_rotary_base_wherever_it_is(rope: dict) -> None:
    assert translate({name: value for name, value in LLAMA_3.items() if "rope" not in name} | rope) == translate(
        LLAMA_3
    )


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope_scaling": SCALED}, "rope_scaling.factor = 8.0"),
        ({"rope_scaling": SCALED_3 | {"low_freq_factor": 2.0}}, "rope_scaling.low_freq_factor = 2.0"),
        ({"rope_scaling": SCALED_3 | {"high_freq_factor": 5.0}}, "rope_scaling.high_freq_factor = 5.0"),
        (
            {"rope_parameters": SCALED_3 | {"original_max_position_embeddings": 4096}},
            "rope_parameters.original_max_position_embeddings = 4096",
        ),
        ({"rope_scaling": SCALED_3 | {"factor": None}}, "rope_scaling.factor = None"),
        (
            {"rope_scaling": SCALED_3, "rope_parameters": SCALED_3 | {"factor": 32.0}},
            "rope_parameters .*32.0.* contradicts rope_scaling .*8.0",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.rope_type = 'linear'"),
        (
            {"rope_scaling": {"type": "default", "rope_type": "yarn"}},
            "rope_type 'yarn' contradicts rope_type 'default'",
        ),
        ({"rope_scaling": {"factor": 2.0}}, "rope_scaling.factor = 2.0"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters.full_attention = "),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor = 0.5"),
        (
            {"rope_parameters": {"rope_theta": 1e4}},
            "rope_theta 500000.0 contradicts rope_parameters.rope_theta 10000.0",
        ),
        ({"rope_parameters": [1e4]}, r"rope_parameters = \[10000.0\] is not supported; it must be an object"),
        ({"rope_theta": 10000.5}, "rope_theta = 10000.5 is not supported; it must be a whole number"),
        ({"rope_theta": 0}, "rope_theta = 0 is not supported; it must be a positive number"),
        ({"rope_theta": "large"}, "rope_theta = 'large'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"attention_bias": "yes"}, "attention_bias = 'yes'"),
        ({"mlp_bias": 1}, "mlp_bias = 1"),
        ({"pretraining_tp": 2}, "pretraining_tp = 2"),
        ({"sliding_window": 4096}, "sliding_window = 4096"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported; supported is 'silu'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"rms_norm_eps": 0}, "rms_norm_eps = 0"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps = 'small'"),
        ({"head_dim": 63}, "head_dim = 63 is not supported; rotary embeddings need an even number"),
        ({"head_dim": 0}, "head_dim = 0"),
        ({"num_attention_heads": 24}, "num_attention_heads = 24 is not supported; it must divide hidden_size = 4096"),
        ({"num_key_value_heads": 5}, "num_key_value_heads = 5 .* must divide num_attention_heads = 32"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
        ({"vocab_size": "32000"}, "vocab_size = '32000'"),
        ({"tie_word_embeddings": None}, "tie_word_embeddings = None"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures .* supported is 'LlamaForCausalLM'"),
        ({"model_type": "t5"}, "model_type 't5' is not supported; supported are 'nemotron_h' .*, 'llama'"),
        ({"model_type": ["llama"]}, "model_type .* is not supported"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_refused_by_name(changes: dict, named: str) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        translate(LLAMA_3 | changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "hidden_size",
        "intermediate_size",
        "max_position_embeddings",
        "num_attention_heads",
        "num_hidden_layers",
        "vocab_size",
    ],
)
def test_missing_field_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=f"field {name} is missing"):
        translate({key: value for key, value in LLAMA_3.items() if key != name})


def test_files_of_transformers(tmp_path: Path) -> None:
    config = LlamaConfig(num_hidden_layers=2, architectures=["LlamaForCausalLM"])
    assert translate(config.to_dict()).layer_count == 4
    config.save_pretrained(tmp_path)
    assert "rope_parameters" in json.loads((tmp_path / "config.json").read_text())
    assert read_hf_config(tmp_path) == translate(config.to_dict())
