"""A `config.json` of a recurrent or hybrid family is translated whole, or refused by the name of the field."""

from __future__ import annotations

import dataclasses
import math

import pytest

from megatron_ext.config import ModelConfig
from megatron_ext.config.model_fields import MULTIPLIERS
from megatron_ext.errors import ConfigError
from megatron_ext.models.huggingface.hf_checkpoint import translate
from tests.unit_tests.models.huggingface.published_hybrids import (
    BAMBA,
    CODESTRAL,
    FALCON_H1,
    GRANITE,
    LFM2,
    LFM2_MOE,
    OLMO,
    QWEN,
    QWEN_MOE,
    QWEN_MOE_TEXT,
    QWEN_TEXT,
)


def sizes(config: ModelConfig) -> tuple[int, ...]:
    """Sizes of a Mamba-2 layer: heads, their channels, groups and states."""
    return config.mamba_heads, config.mamba_head_dim, config.mamba_num_groups, config.mamba_state_dim


def test_mamba2() -> None:
    """FA-2."""
    config = translate(CODESTRAL)
    assert (config.hybrid_override_pattern, sizes(config)) == ("M" * 64, (128, 64, 8, 128))
    assert config.untie_embeddings_and_output_weights
    assert translate({**CODESTRAL, "chunk_size": 128, "norm_before_gate": False}).mamba_chunk_size == 128


def test_bamba() -> None:
    """FA-2: half of a head is rotated unless the file says otherwise; `attn_rotary_emb` says it in channels."""
    config = translate(BAMBA)
    assert [i // 2 for i, letter in enumerate(config.hybrid_override_pattern) if letter == "*"] == [9, 18, 27]
    assert (sizes(config), config.rotary_percent) == ((128, 64, 1, 128), 0.5)
    assert translate(BAMBA | {"mamba_d_head": "auto"}).mamba_head_dim == 64
    said = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}}
    assert translate(BAMBA | said | {"attn_rotary_emb": 32}).rotary_percent == 0.25


def test_granite() -> None:
    """FA-2: multipliers, no positions, a shared expert; dense where there are no experts."""
    config = translate(GRANITE)
    assert config.hybrid_override_pattern == "MEME*EME"
    assert (config.embedding_multiplier, config.residual_multiplier, config.softmax_scale) == (12, 0.22, 0.0078125)
    assert math.isclose(config.logits_multiplier * 6, 1)
    assert (config.position_embedding_type, config.expert_ffn_size) == ("none", 512)
    assert (config.moe_shared_expert_intermediate_size, config.moe_router_topk) == (1024, 6)
    dense = translate(GRANITE | {"num_local_experts": 0, "position_embedding_type": "rope"})
    assert (dense.hybrid_override_pattern, dense.ffn_size) == ("M-M-*-M-", 1024)
    assert (dense.position_embedding_type, dense.rotary_base) == ("rope", 10000)


def test_lfm2() -> None:
    """FA-2: two thirds of the width, rounded up; the family's base where the file says none."""
    config = translate(LFM2)
    assert [i // 2 for i, letter in enumerate(config.hybrid_override_pattern) if letter == "*"] == [2, 5, 8, 10, 12, 14]
    assert (config.recurrent_layer, config.short_conv_kernel_dim, config.ffn_size) == ("short_conv", 3, 8192)
    assert (config.rotary_base, config.untie_embeddings_and_output_weights) == (1_000_000, False)
    assert translate(LFM2 | {"block_ff_dim": 6656}).ffn_size == 4608
    assert translate(LFM2 | {"block_ffn_dim_multiplier": 1.5}).ffn_size == 12288
    assert translate(LFM2 | {"rope_parameters": {"rope_theta": 500.0}}).rotary_base == 500


def test_falcon_h1() -> None:
    """FA-2: attention is linear in its values, so that factors before it become factors after it."""
    config = translate(FALCON_H1)
    assert (config.hybrid_override_pattern, sizes(config)) == ("P-" * 36, (24, 64, 1, 128))
    assert (config.rotary_base, config.mamba_gated_norm) == (100_000_000_000, None)
    assert config.mamba_multipliers == pytest.approx((0.4419, 0.3125, 0.4419, 0.625, 0.4419), abs=1e-4)
    doubled = translate(FALCON_H1 | {"attention_in_multiplier": 2.0})
    assert doubled.softmax_scale == pytest.approx(4 * 0.390625 / 8)
    assert doubled.attention_output_multiplier == pytest.approx(0.75)
    wide = translate(FALCON_H1 | {"mamba_d_ssm": None, "mamba_n_heads": 32, "mamba_rms_norm": True})
    assert (sizes(wide), wide.mamba_gated_norm) == ((32, 64, 1, 128), "gate_first")


def test_qwen3_5() -> None:
    """FA-2: alone, and as the text side of a model that reads images too; axes of positions change nothing."""
    config = translate(QWEN_TEXT)
    assert (config.hybrid_override_pattern, config.recurrent_layer) == ("M-M-M-*-" * 2, "gated_delta_net")
    assert (config.rotary_base, config.rotary_percent, config.head_channels) == (10_000_000, 0.25, 256)
    assert (config.attention_output_gate, config.apply_layernorm_1p, config.qk_layernorm) == (True, True, True)
    assert translate(QWEN) == config
    assert not translate(QWEN | {"tie_word_embeddings": True}).untie_embeddings_and_output_weights


def test_olmo_hybrid() -> None:
    """FA-2: norms follow attention and MLP; a rotary base of null means no rotation, a missing base means 10,000."""
    config = translate(OLMO)
    assert (config.hybrid_override_pattern, config.position_embedding_type) == ("M-M-M-AF" * 2, "none")
    assert (config.qk_layernorm_over_heads, config.linear_norm_epsilon) == (True, 1e-5)
    sparse = {name: value for name, value in OLMO.items() if not name.startswith(("linear_", "rope", "layer_types"))}
    assert dataclasses.replace(translate(sparse), position_embedding_type="none") == config
    assert translate(sparse).position_embedding_type == "rope"
    assert translate(sparse | {"num_hidden_layers": 3}).hybrid_override_pattern == "M-M-AF"
    assert translate(sparse | {"rope_theta": None}).position_embedding_type == "none"


def test_qwen3_5_moe() -> None:
    """FA-2: experts in every layer, with a gated shared one."""
    config = translate(QWEN_MOE_TEXT)
    assert (config.hybrid_override_pattern, config.num_experts, config.moe_router_topk) == ("MEMEME*E" * 2, 256, 8)
    assert (config.expert_ffn_size, config.moe_shared_expert_intermediate_size) == (512, 512)
    assert (config.moe_shared_expert_gate, config.moe_router_pre_softmax) == (True, False)
    assert translate(QWEN_MOE) == config


def test_lfm2_moe() -> None:
    """FA-2: MLPs first, then experts; the width is what the file says."""
    config = translate(LFM2_MOE)
    assert (config.hybrid_override_pattern, config.ffn_size, config.expert_ffn_size) == ("M-M-*EME", 7168, 1792)
    assert (config.moe_router_score_function, config.moe_router_enable_expert_bias) == ("sigmoid", True)


REFUSED = [
    (LFM2_MOE, {"norm_topk_prob": False}, "norm_topk_prob = False is not supported with num_experts_per_tok = 4"),
    (LFM2_MOE, {"num_dense_layers": 5}, "num_dense_layers = 5 is not supported; it must be 0 to 4"),
    (LFM2_MOE, {"layer_types": None}, "layer_types = None is not supported; it must be a list of conv"),
    (QWEN_MOE_TEXT, {"num_experts_per_tok": 1}, "num_experts_per_tok = 1 is not supported with num_experts = 256"),
    (QWEN_MOE, {"text_config": QWEN_TEXT}, "text_config.model_type = 'qwen3_5_text' is not supported"),
    (OLMO, {"rope_theta": 5e5}, "rope_parameters.rope_theta = None contradicts rope_theta"),
    (OLMO, {"linear_num_value_heads": 31}, "linear_num_key_heads = 30 is not supported; it must divide"),
    (OLMO, {"linear_allow_neg_eigval": 2}, "linear_allow_neg_eigval = 2 is not supported; it must be true or false"),
    (OLMO, {"layer_types": ["sliding_attention"] * 8}, "layer_types has 'sliding_attention'"),
    (QWEN, {"quantization_config": {"bits": 4}}, "quantization_config = {'bits': 4} is not supported"),
    (QWEN, {"text_config": None}, "text_config = None is not supported; it must be an object"),
    (QWEN, {"text_config": QWEN_TEXT | {"model_type": "qwen3_5_moe_text"}}, "text_config.model_type = 'qwen3_5_moe"),
    (
        QWEN,
        {"text_config": QWEN_TEXT | {"tie_word_embeddings": True}},
        "= True contradicts tie_word_emb",
    ),
    (QWEN_TEXT, {"attn_output_gate": False}, "attn_output_gate = False is not supported"),
    (QWEN_TEXT, {"mlp_only_layers": [1]}, r"mlp_only_layers = \[1\] is not supported"),
    (QWEN_TEXT, {"linear_num_value_heads": 40}, "linear_num_key_heads = 16 is not supported; it must divide"),
    (QWEN_TEXT, {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}, "rope_parameters.rope_type = 'linear' is"),
    (FALCON_H1, {"ssm_multipliers": [1.0, 2.0]}, r"ssm_multipliers = \[1.0, 2.0\] .* list of 5 positive numbers"),
    (FALCON_H1, {"mlp_multipliers": [1.0, 0]}, "mlp_multipliers = 0 is not supported; it must be a positive number"),
    (FALCON_H1, {"projectors_bias": True}, "projectors_bias = True is not supported"),
    (FALCON_H1, {"mamba_use_mlp": False}, "mamba_use_mlp = False is not supported"),
    (FALCON_H1, {"mamba_d_ssm": 1537}, "do not make up the 1537 channels"),
    (FALCON_H1, {"attn_layer_indices": [1]}, r"attn_layer_indices = \[1\] is not supported"),
    (LFM2, {"conv_bias": True}, "conv_bias = True is not supported"),
    (LFM2, {"full_attn_idxs": [1], "layer_types": ["conv"] * 16}, r"full_attn_idxs = \[1\] contradicts layer_types"),
    (LFM2, {"conv_dim": 1024}, "conv_dim 1024 contradicts hidden_size 2048|hidden_size 2048 contradicts"),
    (LFM2, {"conv_L_cache": 1}, "--short-conv-kernel-dim 1 must be between 2 and 1024"),
    (LFM2, {"use_pos_enc": False}, "use_pos_enc = False is not supported"),
    (CODESTRAL, {"use_bias": True}, "use_bias = True is not supported"),
    (CODESTRAL, {"time_step_limit": [0.001, 0.1]}, r"time_step_limit = \[0.001, 0.1\] is not supported"),
    (CODESTRAL, {"head_dim": 32}, "num_heads = 128 of head_dim = 32 do not make up the 8192 channels"),
    (CODESTRAL, {"n_groups": 5}, "n_groups = 5 is not supported; it must divide num_heads = 128"),
    (BAMBA, {"mamba_proj_bias": True}, "mamba_proj_bias = True is not supported"),
    (BAMBA, {"mamba_conv_bias": False}, "mamba_conv_bias = False is not supported"),
    (BAMBA, {"mlp_bias": True}, "mlp_bias = True is not supported"),
    (BAMBA, {"attn_layer_indices": [32]}, r"attn_layer_indices = \[32\] is not supported; .* layers, 0 to 31"),
    (BAMBA, {"attn_rotary_emb": 128}, "attn_rotary_emb = 128 contradicts partial_rotary_factor = 0.5"),
    (BAMBA, {"partial_rotary_factor": 0.75}, "partial_rotary_factor = 0.75 is not supported; supported is 0.5"),
    (BAMBA, {"mamba_n_heads": 100}, "mamba_n_heads = 100 of mamba_d_head = 64 do not make up the 8192 channels"),
    (BAMBA, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling.rope_type = 'linear'"),
    (GRANITE, {"position_embedding_type": "alibi"}, "position_embedding_type = 'alibi' is not supported"),
    (GRANITE, {"normalization_function": "layernorm"}, "normalization_function = 'layernorm' is not supported"),
    (GRANITE, {"num_experts_per_tok": 1}, "num_experts_per_tok = 1 is not supported .*; supported are 2 to 64"),
    (GRANITE, {"residual_multiplier": -1}, "residual_multiplier = -1 is not supported; it must be a positive number"),
    (GRANITE, {"logits_scaling": 0}, "logits_scaling = 0 is not supported; it must be a positive number"),
    (GRANITE, {"layer_types": ["mamba", "sliding"] * 2}, "layer_types has 'sliding'"),
    (GRANITE, {"attention_bias": True}, "attention_bias = True is not supported"),
]


@pytest.mark.parametrize(("published", "changes", "message"), REFUSED, ids=lambda value: str(value)[-50:])
def test_fields_that_are_not_supported_are_refused(published: dict, changes: dict, message: str) -> None:
    """FA-2: unsupported fields are refused by name and value, in one line."""
    with pytest.raises(ConfigError, match=message) as caught:
        translate(published | changes)
    assert "\n" not in str(caught.value)


SENSELESS = [
    *(({name: 0.0}, f"{name} 0.0 must be more than 0") for name in MULTIPLIERS),
    ({"softmax_scale": math.nan}, "softmax_scale nan must be more than 0"),
    ({"mlp_gate_multiplier": 2.0}, "mlp_gate_multiplier 2.0 is for gated MLPs; give --swiglu"),
    (
        {"embedding_multiplier": 2.0, "position_embedding_type": "learned_absolute"},
        "embedding_multiplier 2.0 .*learned positions",
    ),
    ({"qk_layernorm_over_heads": True}, "qk_layernorm_over_heads needs --qk-layernorm and plain RMSNorm"),
    ({"mamba_gated_norm": "last"}, "mamba_gated_norm 'last' is unknown; one of gate_first, norm_first"),
    ({"mamba_multipliers": (1.0, 2.0)}, "must be five numbers above zero, for z, x, B, C and dt"),
    ({"linear_norm_epsilon": 0.0}, "linear_norm_epsilon 0.0 must be more than 0"),
    ({"swiglu": True, "activation_func_clamp_value": 0.0}, "--activation-func-clamp-value 0.0 must be more than 0"),
    ({"softmax_type": "sink"}, "--softmax-type 'sink' is unknown; one of vanilla, learnable"),
    ({"moe_router_score_function": "tanh"}, "--moe-router-score-function 'tanh' is unknown; one of softmax, sigmoid"),
    (
        {"recurrent_layer": "short_conv", "short_conv_kernel_dim": 1},
        "--short-conv-kernel-dim 1 must be between 2 and 1024",
    ),
    (
        {"hybrid_override_pattern": "PQ"},
        r"has unknown letter 'Q'; known are .* P \(attention and recurrent side by side\)",
    ),
]


@pytest.mark.parametrize(("settings", "message"), SENSELESS, ids=str)
def test_settings_that_make_no_sense_are_refused(settings: dict, message: str) -> None:
    """SE-1: invalid settings are refused, even if a checkpoint of ours has them."""
    with pytest.raises(ConfigError, match=message):
        ModelConfig(**settings)
