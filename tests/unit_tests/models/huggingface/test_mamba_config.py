"""A `config.json` of Mamba, FalconMamba or Jamba is translated whole, or refused by the name of the field."""

from __future__ import annotations

import pytest
from transformers import FalconMambaConfig, JambaConfig, MambaConfig

from megatron_ext.config import ModelConfig
from megatron_ext.errors import ConfigError
from megatron_ext.models.huggingface.hf_checkpoint import translate

# The fields of the published models.
MAMBA = {
    "architectures": ["MambaForCausalLM"],
    "bos_token_id": 0,
    "conv_kernel": 4,
    "d_inner": 1536,
    "d_model": 768,
    "eos_token_id": 0,
    "expand": 2,
    "fused_add_norm": True,
    "hidden_act": "silu",
    "hidden_size": 768,
    "initializer_range": 0.1,
    "intermediate_size": 1536,
    "layer_norm_epsilon": 1e-05,
    "model_type": "mamba",
    "n_layer": 24,
    "num_hidden_layers": 24,
    "pad_token_id": 0,
    "pad_vocab_size_multiple": 8,
    "rescale_prenorm_residual": False,
    "residual_in_fp32": True,
    "rms_norm": True,
    "ssm_cfg": {},
    "state_size": 16,
    "time_step_floor": 0.0001,
    "time_step_init_scheme": "random",
    "time_step_max": 0.1,
    "time_step_min": 0.001,
    "time_step_rank": 48,
    "time_step_scale": 1.0,
    "use_bias": False,
    "use_cache": True,
    "use_conv_bias": True,
    "vocab_size": 50280,
}
FALCON = {
    "architectures": ["FalconMambaForCausalLM"],
    "conv_kernel": 4,
    "expand": 16,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 8192,
    "layer_norm_epsilon": 1e-05,
    "mixer_rms_eps": 1e-06,
    "model_type": "falcon_mamba",
    "num_hidden_layers": 64,
    "residual_in_fp32": True,
    "state_size": 16,
    "tie_word_embeddings": False,
    "time_step_rank": 256,
    "use_bias": False,
    "use_conv_bias": True,
    "use_falcon_mambapy": False,
    "vocab_size": 65024,
}
JAMBA = {
    "architectures": ["JambaForCausalLM"],
    "attention_dropout": 0.0,
    "attn_layer_offset": 4,
    "attn_layer_period": 8,
    "bos_token_id": 1,
    "calc_logits_for_entire_prompt": False,
    "eos_token_id": 2,
    "expert_layer_offset": 1,
    "expert_layer_period": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_state": 16,
    "mamba_dt_rank": 256,
    "mamba_expand": 2,
    "mamba_inner_layernorms": True,
    "mamba_proj_bias": False,
    "max_position_embeddings": 262144,
    "model_type": "jamba",
    "n_ctx": None,
    "num_attention_heads": 32,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_logits_to_keep": 1,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_mamba_kernels": True,
    "vocab_size": 65536,
}
PUBLISHED = {"mamba": MAMBA, "falcon_mamba": FALCON, "jamba": JAMBA}


def test_mamba() -> None:
    assert translate(MAMBA) == ModelConfig(
        hybrid_override_pattern="M" * 24,
        recurrent_layer="mamba1",
        hidden_size=768,
        vocab_size=50280,
        mamba_state_dim=16,
        mamba_conv_kernel=4,
        mamba_inner_size=1536,
        mamba_dt_rank=48,
        norm_epsilon=1e-5,
        num_attention_heads=1,
    )


def test_falcon_mamba() -> None:
    """The width is `intermediate_size`, whatever `expand` says, as in transformers."""
    config = translate(FALCON)
    assert (config.hybrid_override_pattern, config.mamba_channels, config.dt_rank) == ("M" * 64, 8192, 256)
    assert (config.mamba_inner_norm, config.inner_norm_epsilon, config.norm_epsilon) == ("plain", 1e-6, 1e-5)
    assert config.untie_embeddings_and_output_weights


def test_jamba() -> None:
    config = translate(JAMBA)
    assert config.hybrid_override_pattern == "M-MEM-ME*-MEM-ME" * 4
    assert (config.recurrent_layer, config.mamba_channels, config.dt_rank) == ("mamba1", 8192, 256)
    assert (config.mamba_inner_norm, config.inner_norm_epsilon) == ("weighted", 1e-6)
    assert (config.query_groups, config.position_embedding_type, config.swiglu) == (8, "none", True)
    assert (config.num_experts, config.expert_ffn_size, config.moe_router_topk) == (16, 14336, 2)
    assert config.moe_router_pre_softmax


@pytest.mark.parametrize("config_class", [MambaConfig, FalconMambaConfig, JambaConfig])
def test_defaults_are_those_of_transformers(config_class: type) -> None:
    """A file that leaves out what its family has a default for means the same as one that says it."""
    told = config_class().to_dict()
    needed = {name: told[name] for name in ("model_type", "hidden_size", "vocab_size", "num_hidden_layers")}
    if config_class is JambaConfig:
        needed |= {name: told[name] for name in ("intermediate_size", "num_attention_heads", "num_key_value_heads")}
    assert translate(needed) == translate(told)


REFUSED = [
    ("mamba", {"use_bias": True}, "use_bias = True"),
    ("mamba", {"use_conv_bias": False}, "use_conv_bias = False"),
    ("mamba", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    ("mamba", {"intermediate_size": 1000}, "intermediate_size 1000 contradicts intermediate_size 1536"),
    ("mamba", {"n_layer": 23}, "contradicts"),
    ("mamba", {"time_step_rank": 0}, "time_step_rank = 0"),
    ("mamba", {"ssm_cfg": {"layer": "Mamba2"}}, "ssm_cfg"),
    ("mamba", {"architectures": ["MambaModel"]}, "architectures"),
    ("falcon_mamba", {"mixer_rms_eps": 0}, "mixer_rms_eps = 0"),
    ("falcon_mamba", {"quantization_config": {"bits": 4}}, "quantization_config"),
    ("jamba", {"mamba_proj_bias": True}, "mamba_proj_bias = True"),
    ("jamba", {"mamba_inner_layernorms": False}, "mamba_inner_layernorms = False"),
    ("jamba", {"attn_layer_offset": 8}, "attn_layer_offset = 8 .* less than attn_layer_period = 8"),
    ("jamba", {"expert_layer_offset": -1}, "expert_layer_offset = -1"),
    ("jamba", {"num_experts_per_tok": 17}, "num_experts_per_tok 17 is more than num_experts 16"),
    ("jamba", {"sliding_window": 4096}, "sliding_window = 4096"),
    ("jamba", {"layers_block_type": ["mamba"] * 32}, "layers_block_type .* contradicts attn_layer_period"),
    ("jamba", {"num_key_value_heads": 5}, "num_key_value_heads = 5"),
]


@pytest.mark.parametrize(("family", "changed", "message"), REFUSED, ids=[f"{c[0]}-{next(iter(c[1]))}" for c in REFUSED])
def test_refused_by_the_name_of_the_field(family: str, changed: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        translate(PUBLISHED[family] | changed)
