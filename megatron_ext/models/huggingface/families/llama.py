"""Llama checkpoints of Hugging Face: `config.json` as a `ModelConfig`, tensors under megatron-core's names.

A decoder layer of theirs is two letters of the pattern, attention and MLP ("*-"), each with its norm and its residual.
Rotary embeddings rotate the two halves of a head against each other on both sides, so query and key are copied as they
are. Everything that could change the logits is either translated or refused by its name.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from torch import nn

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
    size,
    size_or,
    with_present_names,
)
from megatron_ext.models.huggingface.rotary import ROPE_FIELDS, rotary_fields
from megatron_ext.models.huggingface.weights import (
    EMBEDDING,
    FINAL_NORM,
    LM_HEAD,
    OUTPUT,
    QKV,
    fill_model,
    names_without_prefix,
)
from megatron_ext.models.weight_files import WeightFiles

MODEL_TYPE = "llama"
ARCHITECTURE = "LlamaForCausalLM"
_LAYER = "*-"
_PREFIXES = ("model.",)
# transformers' values of fields that older files leave out.
_DEFAULT_EPSILON = 1e-6

# Positive integers, under their names in `ModelConfig`.
_SIZES = {
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "max_position_embeddings": "max_position_embeddings",
    "num_attention_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
}

# Only these values are supported; a field that is absent has the first one.
_FIXED: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "hidden_act": ("silu", "swish"),
    "pretraining_tp": (1, None),
    "sliding_window": (None,),
    "partial_rotary_factor": (1.0, None),
    "quantization_config": (None,),
    "is_encoder_decoder": (False,),
}

# Translated below, one by one.
_TRANSLATED = frozenset(
    """
    architectures model_type num_hidden_layers num_key_value_heads head_dim rms_norm_eps tie_word_embeddings
    """.split()
)
_KNOWN = set(_SIZES) | set(_FIXED) | _TRANSLATED | ROPE_FIELDS | WITHOUT_EFFECT

# Ours below `decoder.layers.N.`, theirs below `layers.M.`.
_LAYER_TENSORS: dict[str, dict[str, tuple[str, ...]]] = {
    "*": {
        "input_layernorm.weight": ("input_layernorm.weight",),
        QKV: ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        "self_attention.linear_proj.weight": ("self_attn.o_proj.weight",),
    },
    "-": {
        "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight",),
        "mlp.linear_fc1.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        "mlp.linear_fc2.weight": ("mlp.down_proj.weight",),
    },
}
# Older files hold the rotary frequencies, which follow from the configuration.
_FREQUENCIES = re.compile(r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


def translate(raw: dict[str, Any]) -> ModelConfig:
    """A decoded `config.json` of this family as a `ModelConfig`.

    Raises:
        ConfigError: A field is missing, unknown, or has a value that is not supported.
    """
    check_architecture(raw, ARCHITECTURE)
    fields = with_present_names(raw, {})
    check_known(fields, _KNOWN)
    check_fixed(fields, _FIXED)
    query_heads = size(fields, "num_attention_heads")
    fields["num_key_value_heads"] = key_value_heads = size_or(fields, "num_key_value_heads", query_heads)
    check_divides(fields, "num_key_value_heads", "num_attention_heads")
    if fields.get("head_dim") is None:
        check_divides(fields, "num_attention_heads", "hidden_size")
    return ModelConfig(
        **{ours: size(fields, theirs) for theirs, ours in _SIZES.items()},
        hybrid_override_pattern=_LAYER * layers(fields),
        group_query_attention=key_value_heads != query_heads,
        num_query_groups=key_value_heads,
        kv_channels=_head_size(fields, size(fields, "hidden_size") // query_heads),
        norm_epsilon=positive_number(fields, "rms_norm_eps", default=_DEFAULT_EPSILON),
        untie_embeddings_and_output_weights=not flag(fields, "tie_word_embeddings", default=False),
        position_embedding_type="rope",
        **rotary_fields(fields),
        normalization="RMSNorm",
        swiglu=True,
        disable_bias_linear=True,
    )


def _head_size(fields: dict[str, Any], default: int) -> int:
    channels = size_or(fields, "head_dim", default)
    if channels % 2:
        raise ConfigError(f"config.json: head_dim = {channels} is not supported; rotary embeddings need an even number")
    return channels


def load_weights(model: nn.Module, config: ModelConfig, directory: Path) -> None:
    """Fill every tensor of `model`, built from `config`, in the types the parameters have.

    Raises:
        CheckpointError: See `fill_model`.
    """
    files = WeightFiles(directory)
    stored = names_without_prefix(files, _PREFIXES)
    weights = {name: file for name, file in stored.items() if not _FREQUENCIES.fullmatch(name)}
    fill_model(model, config, files, weights, _tensor_sources(config))


def _tensor_sources(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Our parameter names to the tensors that they come from, theirs without prefix."""
    sources: dict[str, tuple[str, ...]] = {EMBEDDING: ("embed_tokens.weight",)}
    for index, letter in enumerate(config.hybrid_override_pattern):
        theirs_index = index // len(_LAYER)
        for ours, theirs in _LAYER_TENSORS[letter].items():
            sources[f"decoder.layers.{index}.{ours}"] = tuple(f"layers.{theirs_index}.{name}" for name in theirs)
    sources[FINAL_NORM] = ("norm.weight",)
    if config.untie_embeddings_and_output_weights:
        sources[OUTPUT] = (LM_HEAD,)
    return sources
