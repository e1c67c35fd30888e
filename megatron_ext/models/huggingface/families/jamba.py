"""Jamba checkpoints of Hugging Face: `config.json` as a `ModelConfig`, tensors under megatron-core's names.

A decoder layer of theirs is two letters of the pattern, a Mamba-1 mixer or attention and then an MLP or experts ("M-",
"ME", "*-", "*E"), each with its norm and its residual. Attention knows no positions. Experts are weighted by a softmax
over all of them, which is not normalized again over those that are chosen. Everything that could change the logits is
either translated or refused by its name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from megatron_ext.config import ModelConfig
from megatron_ext.errors import ConfigError
from megatron_ext.models.huggingface.families.mamba import MIXER_TENSORS, dt_rank
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

MODEL_TYPE = "jamba"
ARCHITECTURE = "JambaForCausalLM"
_PREFIXES = ("model.",)
_LAYER_LETTERS = 2
_KINDS = {"M": "mamba", "*": "attention"}

_OTHER_NAMES = {"num_local_experts": "num_experts"}

# Positive integers, under their names in `ModelConfig`.
_SIZES = {
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "max_position_embeddings": "max_position_embeddings",
    "num_attention_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
    "mamba_d_state": "mamba_state_dim",
    "mamba_d_conv": "mamba_conv_kernel",
}
# transformers' values of fields that files may leave out.
_DEFAULTS = {
    "max_position_embeddings": 262144,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "num_experts": 16,
    "num_experts_per_tok": 2,
}
# First layer, and the distance to the next, of layers that are something else than a mixer or an MLP.
_EVERY = {
    "attn_layer": (4, 8),
    "expert_layer": (1, 2),
}

# Only these values are supported; a field that is absent has the first one.
_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "mamba_proj_bias": (False,),
    "mamba_conv_bias": (True,),
    "mamba_inner_layernorms": (True,),
    "sliding_window": (None,),
    "rope_scaling": (None,),
    "quantization_config": (None,),
    "is_encoder_decoder": (False,),
}

_TRANSLATED = frozenset(
    """
    architectures model_type num_hidden_layers num_key_value_heads rms_norm_eps tie_word_embeddings
    mamba_expand mamba_dt_rank
    num_experts num_experts_per_tok attn_layer_period attn_layer_offset expert_layer_period expert_layer_offset
    layers_block_type
    """.split()
)
# Ask for other outputs, or say which kernels to run.
_WITHOUT_EFFECT = frozenset(
    """
    output_router_logits router_aux_loss_coef use_mamba_kernels use_mambapy use_associative_scan num_logits_to_keep
    calc_logits_for_entire_prompt
    """.split()
)
_KNOWN = set(_SIZES) | set(_FIXED) | _TRANSLATED | _WITHOUT_EFFECT | WITHOUT_EFFECT

# Ours below `decoder.layers.N.`, theirs below `layers.M.`.
_LAYER_TENSORS: dict[str, dict[str, tuple[str, ...]]] = {
    "M": {
        "norm.weight": ("input_layernorm.weight",),
        **{f"mixer.{name}": (f"mamba.{name}",) for name in MIXER_TENSORS},
        **{f"mixer.{name}_layernorm.weight": (f"mamba.{name}_layernorm.weight",) for name in ("dt", "b", "c")},
    },
    "*": {
        "input_layernorm.weight": ("input_layernorm.weight",),
        QKV: ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        "self_attention.linear_proj.weight": ("self_attn.o_proj.weight",),
    },
    "-": {
        "pre_mlp_layernorm.weight": ("pre_ff_layernorm.weight",),
        "mlp.linear_fc1.weight": ("feed_forward.gate_proj.weight", "feed_forward.up_proj.weight"),
        "mlp.linear_fc2.weight": ("feed_forward.down_proj.weight",),
    },
    "E": {  # and those of each expert, see `_layer_tensors`
        "pre_mlp_layernorm.weight": ("pre_ff_layernorm.weight",),
        "mlp.router.weight": ("feed_forward.router.weight",),
    },
}


def translate(raw: dict[str, Any]) -> ModelConfig:
    """A decoded `config.json` of this family as a `ModelConfig`.

    Raises:
        ConfigError: A field is missing, unknown, or has a value that is not supported.
    """
    check_architecture(raw, ARCHITECTURE)
    fields = with_present_names(raw, _OTHER_NAMES)
    check_known(fields, _KNOWN)
    check_fixed(fields, _FIXED)
    fields = _DEFAULTS | fields
    query_heads = size(fields, "num_attention_heads")
    fields["num_key_value_heads"] = key_value_heads = size_or(fields, "num_key_value_heads", query_heads)
    check_divides(fields, "num_key_value_heads", "num_attention_heads")
    check_divides(fields, "num_attention_heads", "hidden_size")
    pattern = _pattern(fields)
    epsilon = positive_number(fields, "rms_norm_eps", default=1e-6)
    return ModelConfig(
        **{ours: size(fields, theirs) for theirs, ours in _SIZES.items()},
        hybrid_override_pattern=pattern,
        recurrent_layer="mamba1",
        mamba_inner_size=size(fields, "hidden_size") * size(fields, "mamba_expand"),
        mamba_dt_rank=dt_rank(fields, "mamba_dt_rank", size(fields, "hidden_size")),
        mamba_inner_norm="weighted",
        mamba_inner_norm_epsilon=epsilon,
        group_query_attention=key_value_heads != query_heads,
        num_query_groups=key_value_heads,
        norm_epsilon=epsilon,
        untie_embeddings_and_output_weights=not flag(fields, "tie_word_embeddings", default=False),
        position_embedding_type="none",
        normalization="RMSNorm",
        swiglu=True,
        disable_bias_linear=True,
        **(_moe_fields(fields) if "E" in pattern else {}),
    )


def _pattern(fields: dict[str, Any]) -> str:
    """Two letters a layer; some files list the kinds of mixers besides."""
    has_experts = size(fields, "num_experts") > 1
    letters = []
    for index in range(layers(fields)):
        letters.append("*" if _is_every(fields, "attn_layer", index) else "M")
        letters.append("E" if has_experts and _is_every(fields, "expert_layer", index) else "-")
    kinds = [_KINDS[letter] for letter in letters[::_LAYER_LETTERS]]
    if fields.get("layers_block_type") not in (None, kinds):
        raise ConfigError(
            f"config.json: layers_block_type {fields['layers_block_type']!r} contradicts attn_layer_period and "
            f"attn_layer_offset, which make it {kinds!r}"
        )
    return "".join(letters)


def _is_every(fields: dict[str, Any], name: str, index: int) -> bool:
    """Whether layer `index` is one of those that `NAME_offset` and `NAME_period` single out."""
    default_offset, default_period = _EVERY[name]
    offset, period = fields.get(f"{name}_offset", default_offset), size_or(fields, f"{name}_period", default_period)
    if type(offset) is not int or not 0 <= offset < period:
        raise ConfigError(
            f"config.json: {name}_offset = {offset!r} is not supported; it must be at least 0 and less than "
            f"{name}_period = {period}"
        )
    return index % period == offset


def _moe_fields(fields: dict[str, Any]) -> dict[str, Any]:
    experts, chosen = size(fields, "num_experts"), size(fields, "num_experts_per_tok")
    if chosen > experts:
        raise ConfigError(f"config.json: num_experts_per_tok {chosen} is more than num_experts {experts}")
    return {
        "num_experts": experts,
        "moe_ffn_hidden_size": size(fields, "intermediate_size"),
        "moe_router_topk": chosen,
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": True,
    }


def load_weights(model: nn.Module, config: ModelConfig, directory: Path) -> None:
    """Fill every tensor of `model`, built from `config`, in the types the parameters have.

    Raises:
        CheckpointError: See `fill_model`.
    """
    files = WeightFiles(directory)
    fill_model(model, config, files, names_without_prefix(files, _PREFIXES), _tensor_sources(config))


def _tensor_sources(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Our parameter names to the tensors that they come from, theirs without prefix."""
    sources: dict[str, tuple[str, ...]] = {EMBEDDING: ("embed_tokens.weight",)}
    for index, letter in enumerate(config.hybrid_override_pattern):
        for ours, theirs in _layer_tensors(letter, config).items():
            names = tuple(f"layers.{index // _LAYER_LETTERS}.{name}" for name in theirs)
            sources[f"decoder.layers.{index}.{ours}"] = names
    sources[FINAL_NORM] = ("final_layernorm.weight",)
    if config.untie_embeddings_and_output_weights:
        sources[OUTPUT] = (LM_HEAD,)
    return sources


def _layer_tensors(letter: str, config: ModelConfig) -> dict[str, tuple[str, ...]]:
    tensors = dict(_LAYER_TENSORS[letter])
    if letter == "E":
        for expert in range(config.num_experts):
            ours, theirs = f"mlp.experts.local_experts.{expert}", f"feed_forward.experts.{expert}"
            tensors[f"{ours}.linear_fc1.weight"] = (f"{theirs}.gate_proj.weight", f"{theirs}.up_proj.weight")
            tensors[f"{ours}.linear_fc2.weight"] = (f"{theirs}.down_proj.weight",)
    return tensors
