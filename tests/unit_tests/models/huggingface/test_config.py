"""A NemotronH `config.json` is translated whole, or refused by the name of the field."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import NemotronHConfig

from megatron_ext.errors import CheckpointError, ConfigError
from megatron_ext.models.huggingface.hf_checkpoint import read_hf_config, translate

# As the published dense models have it (8B, layers shortened).
PUBLISHED = {
    "architectures": ["NemotronHForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_head_dim": 128,
    "auto_map": {"AutoConfig": "configuration_nemotron_h.NemotronHConfig"},
    "bos_token_id": 1,
    "chunk_size": 256,
    "conv_kernel": 4,
    "eos_token_id": 2,
    "expand": 2,
    "hidden_dropout": 0.0,
    "hidden_size": 4096,
    "hybrid_override_pattern": "M-M*-",
    "initializer_range": 0.02,
    "intermediate_size": 21504,
    "layer_norm_epsilon": 1e-05,
    "mamba_head_dim": 64,
    "mamba_hidden_act": "silu",
    "mamba_num_heads": 128,
    "mamba_proj_bias": False,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "model_type": "nemotron_h",
    "n_groups": 8,
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_logits_to_keep": 1,
    "pad_token_id": 0,
    "rescale_prenorm_residual": True,
    "residual_in_fp32": False,
    "rms_norm_eps": 1e-05,
    "sliding_window": None,
    "ssm_state_size": 128,
    "tie_word_embeddings": False,
    "time_step_floor": 0.0001,
    "time_step_limit": [0.0, float("inf")],
    "time_step_max": 0.1,
    "time_step_min": 0.001,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.48.0.dev0",
    "use_bias": False,
    "use_cache": True,
    "use_conv_bias": True,
    "use_mamba_kernels": True,
    "vocab_size": 131072,
}


def test_published_configuration() -> None:
    config = translate(PUBLISHED)
    assert (config.hybrid_override_pattern, config.hidden_size, config.ffn_size) == ("M-M*-", 4096, 21504)
    assert (config.num_attention_heads, config.query_groups, config.head_channels) == (32, 8, 128)
    assert (config.mamba_heads, config.mamba_head_dim, config.mamba_num_groups) == (128, 64, 8)
    assert (config.mamba_state_dim, config.mamba_conv_kernel, config.mamba_chunk_size) == (128, 4, 256)
    assert (config.squared_relu, config.disable_bias_linear, config.position_embedding_type) == (True, True, "none")
    assert (config.normalization, config.norm_epsilon) == ("RMSNorm", 1e-5)
    assert (config.vocab_size, config.max_position_embeddings) == (131072, 8192)
    assert config.untie_embeddings_and_output_weights


def test_reads_files_of_transformers(tmp_path: Path) -> None:
    """The file form of transformers is read: a list of layer types, infinity as an object."""
    NemotronHConfig(hybrid_override_pattern="M*-", architectures=["NemotronHForCausalLM"]).save_pretrained(tmp_path)
    text = (tmp_path / "config.json").read_text()
    assert "layers_block_type" in text
    assert "__float__" in text
    assert read_hf_config(tmp_path).hybrid_override_pattern == "M*-"


def test_python_s_spelling_of_infinity(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    assert "Infinity" in (tmp_path / "config.json").read_text()
    assert read_hf_config(tmp_path) == translate(PUBLISHED)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hybrid_override_pattern": "ME*-M"}, "field n_routed_experts is missing"),
        ({"layers_block_type": ["mamba", "conv"]}, "layers_block_type has 'conv'"),
        (
            {"layers_block_type": ["mamba", "mlp"]},
            "hybrid_override_pattern 'M-M[*]-' contradicts layers_block_type 'M-'",
        ),
        ({"layers_block_type": "mamba"}, "layers_block_type = 'mamba' is not supported; it must be a list"),
        ({"layers_block_type": [{}]}, "layers_block_type has {}"),
        ({"hybrid_override_pattern": 5}, "hybrid_override_pattern 5 is not supported"),
        ({"architectures": 5}, "architectures 5 is not supported"),
        ({"hybrid_override_pattern": "M-M|-"}, "hybrid_override_pattern"),
        ({"hybrid_override_pattern": "", "num_hidden_layers": 0}, "hybrid pattern is empty"),
        ({"num_hidden_layers": 6}, "num_hidden_layers 6"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"mlp_bias": True}, "mlp_bias = True"),
        ({"use_bias": True}, "use_bias = True"),
        ({"mamba_proj_bias": True}, "mamba_proj_bias = True"),
        ({"use_conv_bias": False}, "use_conv_bias = False"),
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act = 'silu' is not supported; supported is 'relu2'"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"mamba_hidden_act": "gelu"}, "mamba_hidden_act = 'gelu'"),
        ({"time_step_limit": [0.001, 0.1]}, "time_step_limit"),
        ({"time_step_limit": [0.001, {"__float__": "Infinity"}]}, "time_step_limit"),
        ({"mamba_dt_limit": [0.0, 0.1]}, "mamba_dt_limit .* contradicts time_step_limit"),
        ({"sliding_window": 4096}, "sliding_window = 4096"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling"),
        ({"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters"),
        ({"residual_in_fp32": True}, "residual_in_fp32 = True"),
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps 1e-06 contradicts layer_norm_epsilon 1e-05"),
        ({"layer_norm_epsilon": "small", "rms_norm_eps": "small"}, "layer_norm_epsilon = 'small'"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings = 'yes'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"hidden_size": 0}, "hidden_size = 0"),
        ({"head_dim": 128.0, "attention_head_dim": 128.0}, "head_dim = 128.0"),
        ({"ssm_state_size": "128"}, "ssm_state_size = '128'"),
        ({"conv_kernel": True}, "conv_kernel = True"),
        ({"num_key_value_heads": 5}, "num_key_value_heads = 5 .* must divide num_attention_heads = 32"),
        ({"n_groups": 7}, "n_groups = 7 .* must divide mamba_num_heads = 128"),
        ({"format": "megatron_ext"}, "that this package saved; give --load"),
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported; supported are 'nemotron_h' .*'llama'"),
        ({"model_type": None}, "model_type None"),
        ({"architectures": ["NemotronHModel"]}, "architectures .*'NemotronHForCausalLM'"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_refused_by_name(changes: dict, named: str) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        translate(PUBLISHED | changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "attention_head_dim",
        "conv_kernel",
        "hidden_size",
        "hybrid_override_pattern",
        "intermediate_size",
        "mamba_head_dim",
        "mamba_num_heads",
        "max_position_embeddings",
        "n_groups",
        "num_attention_heads",
        "num_key_value_heads",
        "ssm_state_size",
        "vocab_size",
    ],
)
def test_missing_field_is_named(name: str) -> None:
    fields = {key: value for key, value in PUBLISHED.items() if key != name}
    with pytest.raises(ConfigError, match=f"field .*{name.removeprefix('attention_')}.* is missing"):
        translate(fields)


@pytest.mark.parametrize(
    "changes",
    [
        {"rescale_prenorm_residual": False},
        {"expand": 3},
        {"mamba_ssm_cache_dtype": "float32"},
        {"rope_theta": 10000, "partial_rotary_factor": 1.0},
        {"n_routed_experts": 8, "moe_intermediate_size": 7688},
        {"attention_sinks": None},
        {"mamba_hidden_act": "swish"},
        {"time_step_min": 0.01},
    ],
    ids=str,
)
def test_accepts_fields_that_do_not_change_logits(changes: dict) -> None:
    assert translate(PUBLISHED | changes) == translate(PUBLISHED)


def test_no_configuration(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="holds no JSON object"):
        read_hf_config(tmp_path)
