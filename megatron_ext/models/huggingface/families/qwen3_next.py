"""Qwen3-Next checkpoints of Hugging Face: `config.json` as a `ModelConfig`, tensors under megatron-core's names.

A decoder layer of theirs is two letters of the pattern: a gated delta net (M) or attention (*), then an MLP (-) or
experts (E), each with its norm and its residual. What differs in the tensors:

- They keep the input projection of a gated delta net in two matrices whose rows are grouped by key head; we in one,
  [q | k | v | gate | beta | alpha], see `_input_projection`.
- Norms multiply by 1 + weight on both sides (`apply_layernorm_1p`), but for theirs inside the gated delta net.
- Both route by the softmax over the chosen experts, if `norm_topk_prob` says so; otherwise it is refused.

Everything that could change the logits is either translated or refused by its name. What the file says for a head that
predicts several tokens ahead (`mtp.`) is passed over, as transformers does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron_ext.config import ModelConfig
from megatron_ext.errors import ConfigError
from megatron_ext.models.huggingface.fields import (
    WITHOUT_EFFECT,
    check_architecture,
    check_divides,
    check_fixed,
    check_known,
    flag,
    layers,
    positive_number,
    require_field,
    size,
    size_or,
    with_present_names,
)
from megatron_ext.models.huggingface.rotary import ROPE_FIELDS, SHARE, rotary_fields
from megatron_ext.models.huggingface.weights import (
    EMBEDDING,
    FINAL_NORM,
    LM_HEAD,
    OUTPUT,
    QKV,
    Joint,
    fill_model,
    names_without_prefix,
)
from megatron_ext.models.weight_files import WeightFiles

MODEL_TYPE = "qwen3_next"
ARCHITECTURE = "Qwen3NextForCausalLM"
_PREFIXES = ("model.",)
_AHEAD = "mtp."
# transformers' values of fields that files leave out.
_DEFAULT_EPSILON = 1e-6
_DEFAULT_ROTARY_SHARE = 0.25
_DEFAULT_HEAD_SIZE = 256
_DEFAULT_ATTENTION_INTERVAL = 4

# Positive integers, under their names in `ModelConfig`.
_SIZES = {
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "linear_conv_kernel_dim": "linear_conv_kernel_dim",
    "linear_key_head_dim": "linear_key_head_dim",
    "linear_num_key_heads": "linear_num_key_heads",
    "linear_num_value_heads": "linear_num_value_heads",
    "linear_value_head_dim": "linear_value_head_dim",
    "max_position_embeddings": "max_position_embeddings",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_query_groups",
    "vocab_size": "vocab_size",
}
# The same, of experts.
_EXPERT_SIZES = {
    "moe_intermediate_size": "moe_ffn_hidden_size",
    "num_experts": "num_experts",
    "num_experts_per_tok": "moe_router_topk",
    "shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
}

# Only these values are supported; a field that is absent has the first one.
_FIXED: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "hidden_act": ("silu", "swish"),
    "sliding_window": (None,),
    "use_sliding_window": (False,),
    "quantization_config": (None,),
    "is_encoder_decoder": (False,),
}

# Translated below, one by one.
_TRANSLATED = frozenset(
    """
    architectures model_type num_hidden_layers head_dim rms_norm_eps tie_word_embeddings layer_types
    full_attention_interval mlp_only_layers decoder_sparse_step norm_topk_prob
    """.split()
)
_WITHOUT_EFFECT = WITHOUT_EFFECT | {"output_router_logits", "router_aux_loss_coef", "max_window_layers"}
_KNOWN = set(_SIZES) | set(_EXPERT_SIZES) | set(_FIXED) | _TRANSLATED | _WITHOUT_EFFECT | ROPE_FIELDS | {SHARE}
_LAYER_LETTERS = {"linear_attention": "M", "full_attention": "*"}

# Ours below `decoder.layers.N.`, theirs below `layers.M.`.
_IN_PROJ, _OUT_NORM = "mixer.in_proj.weight", "mixer.out_norm.weight"
_LAYER_TENSORS: dict[str, dict[str, tuple[str, ...]]] = {
    "M": {
        "norm.weight": ("input_layernorm.weight",),
        "mixer.A_log": ("linear_attn.A_log",),
        "mixer.dt_bias": ("linear_attn.dt_bias",),
        "mixer.conv1d.weight": ("linear_attn.conv1d.weight",),
        _IN_PROJ: ("linear_attn.in_proj_qkvz.weight", "linear_attn.in_proj_ba.weight"),
        _OUT_NORM: ("linear_attn.norm.weight",),
        "mixer.out_proj.weight": ("linear_attn.out_proj.weight",),
    },
    "*": {
        "input_layernorm.weight": ("input_layernorm.weight",),
        QKV: ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight",),
        "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight",),
        "self_attention.linear_proj.weight": ("self_attn.o_proj.weight",),
    },
    "-": {
        "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight",),
        "mlp.linear_fc1.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        "mlp.linear_fc2.weight": ("mlp.down_proj.weight",),
    },
    "E": {  # and those of each expert, see `_layer_tensors`
        "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight",),
        "mlp.router.weight": ("mlp.gate.weight",),
        "mlp.shared_experts.linear_fc1.weight": (
            "mlp.shared_expert.gate_proj.weight",
            "mlp.shared_expert.up_proj.weight",
        ),
        "mlp.shared_experts.linear_fc2.weight": ("mlp.shared_expert.down_proj.weight",),
        "mlp.shared_experts.gate_weight": ("mlp.shared_expert_gate.weight",),
    },
}


def translate(raw: dict[str, Any]) -> ModelConfig:
    """A decoded `config.json` of this family as a `ModelConfig`.

    Raises:
        ConfigError: A field is missing, unknown, or has a value that is not supported.
    """
    check_architecture(raw, ARCHITECTURE)
    fields = with_present_names(raw, {})
    check_known(fields, _KNOWN)
    check_fixed(fields, _FIXED)
    check_divides(fields, "num_key_value_heads", "num_attention_heads")
    check_divides(fields, "linear_num_key_heads", "linear_num_value_heads")
    pattern = "".join(map("".join, zip(_mixers(fields), _feed_forwards(fields), strict=True)))
    return ModelConfig(
        **{ours: size(fields, theirs) for theirs, ours in _SIZES.items()},
        hybrid_override_pattern=pattern,
        recurrent_layer="gated_delta_net",
        group_query_attention=fields["num_key_value_heads"] != fields["num_attention_heads"],
        kv_channels=size_or(fields, "head_dim", _DEFAULT_HEAD_SIZE),
        norm_epsilon=positive_number(fields, "rms_norm_eps", default=_DEFAULT_EPSILON),
        untie_embeddings_and_output_weights=not flag(fields, "tie_word_embeddings", default=False),
        position_embedding_type="rope",
        **rotary_fields(fields, default_share=_DEFAULT_ROTARY_SHARE),
        qk_layernorm=True,
        attention_output_gate=True,
        normalization="RMSNorm",
        apply_layernorm_1p=True,
        swiglu=True,
        disable_bias_linear=True,
        **(_expert_fields(fields) if "E" in pattern else {}),
    )


def _mixers(fields: dict[str, Any]) -> list[str]:
    """M or * for each layer."""
    count = layers(fields)
    listed = fields.get("layer_types")
    if listed is None:
        interval = size_or(fields, "full_attention_interval", _DEFAULT_ATTENTION_INTERVAL)
        return ["M" if (index + 1) % interval else "*" for index in range(count)]
    if not isinstance(listed, list) or any(kind not in _LAYER_LETTERS for kind in map(str, listed)):
        known = ", ".join(_LAYER_LETTERS)
        raise ConfigError(f"config.json: layer_types = {listed!r} is not supported; it must be a list of {known}")
    if len(listed) != count:
        raise ConfigError(f"config.json: num_hidden_layers {count} contradicts the {len(listed)} layers of layer_types")
    return [_LAYER_LETTERS[kind] for kind in listed]


def _feed_forwards(fields: dict[str, Any]) -> list[str]:
    """E or - for each layer: experts in every `decoder_sparse_step`-th one but those listed."""
    count, step = layers(fields), size_or(fields, "decoder_sparse_step", 1)
    dense = fields.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(index) is not int or not 0 <= index < count for index in dense):
        raise ConfigError(
            f"config.json: mlp_only_layers = {dense!r} is not supported; it must be a list of layers, 0 to {count - 1}"
        )
    dense = set(dense)
    has_experts = require_field(fields, "num_experts") != 0
    return ["E" if has_experts and index not in dense and (index + 1) % step == 0 else "-" for index in range(count)]


def _expert_fields(fields: dict[str, Any]) -> dict[str, Any]:
    sizes = {ours: size(fields, theirs) for theirs, ours in _EXPERT_SIZES.items()}
    chosen, experts = sizes["moe_router_topk"], sizes["num_experts"]
    if not 1 < chosen <= experts:
        raise ConfigError(
            f"config.json: num_experts_per_tok = {chosen} is not supported with num_experts = {experts}; "
            f"supported are 2 to {experts}"
        )
    if not flag(fields, "norm_topk_prob", default=True):
        raise ConfigError(
            "config.json: norm_topk_prob = False is not supported; megatron-core's softmax is over the chosen experts: "
            "supported is True"
        )
    return sizes | {"moe_router_score_function": "softmax", "moe_shared_expert_gate": True}


def load_weights(model: nn.Module, config: ModelConfig, directory: Path) -> None:
    """Fill every tensor of `model`, built from `config`, in the types the parameters have.

    Raises:
        CheckpointError: See `fill_model`.
    """
    files = WeightFiles(directory)
    stored = names_without_prefix(files, _PREFIXES)
    weights = {name: file for name, file in stored.items() if not name.startswith(_AHEAD)}
    fill_model(model, config, files, weights, _tensor_sources(config), _JOINTS)


def _tensor_sources(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Our parameter names to the tensors that they come from, theirs without prefix."""
    sources: dict[str, tuple[str, ...]] = {EMBEDDING: ("embed_tokens.weight",)}
    for index, letter in enumerate(config.hybrid_override_pattern):
        for ours, theirs in _layer_tensors(letter, config).items():
            sources[f"decoder.layers.{index}.{ours}"] = tuple(f"layers.{index // 2}.{name}" for name in theirs)
    sources[FINAL_NORM] = ("norm.weight",)
    if config.untie_embeddings_and_output_weights:
        sources[OUTPUT] = (LM_HEAD,)
    return sources


def _layer_tensors(letter: str, config: ModelConfig) -> dict[str, tuple[str, ...]]:
    tensors = dict(_LAYER_TENSORS[letter])
    for expert in range(config.num_experts if letter == "E" else 0):
        ours, theirs = f"mlp.experts.local_experts.{expert}", f"mlp.experts.{expert}"
        tensors[f"{ours}.linear_fc1.weight"] = (f"{theirs}.gate_proj.weight", f"{theirs}.up_proj.weight")
        tensors[f"{ours}.linear_fc2.weight"] = (f"{theirs}.down_proj.weight",)
    return tensors


def _input_projection(parts: list[Tensor], config: ModelConfig) -> Tensor:
    """Rows [q k v z] of each key head in turn, and [beta alpha] of each -> all of q, of k, of v, of z, beta, alpha."""
    qkvz, ba = (part.unflatten(0, (config.linear_num_key_heads, -1)) for part in parts)  # [key heads, rows, h]
    shared = config.linear_num_value_heads // config.linear_num_key_heads
    keys, values = config.linear_key_head_dim, shared * config.linear_value_head_dim
    sections = [*qkvz.split([keys, keys, values, values], dim=1), *ba.split([shared, shared], dim=1)]
    return torch.cat([section.flatten(0, 1) for section in sections])


def _input_projection_shapes(config: ModelConfig) -> list[tuple[int, ...]]:
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    return [(rows, config.hidden_size) for rows in (2 * (keys + values), 2 * config.linear_num_value_heads)]


_JOINTS = {
    _IN_PROJ: Joint(_input_projection_shapes, _input_projection),
    # Theirs multiplies by the weight, ours by one more.
    _OUT_NORM: Joint(lambda config: [(config.linear_value_head_dim,)], lambda parts, _: parts[0].float() - 1.0),
}
