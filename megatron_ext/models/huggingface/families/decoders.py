"""Llama-like decoders: attention with rotary embeddings, then a gated MLP or experts.

A decoder layer of theirs is two letters of the pattern, attention and MLP ("*-") or experts ("*E"), each with its norm
and its residual. Rotary embeddings rotate the two halves of a head against each other on both sides, so query and key
are copied unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from megatron_ext.config import ModelConfig
from megatron_ext.errors import ConfigError
from megatron_ext.models.huggingface.attention import (
    DEFAULT_BASE,
    ROPE_FIELDS,
    SHARE,
    attention_heads,
    rotary_fields,
    rotated_head_size,
)
from megatron_ext.models.huggingface.family import Family
from megatron_ext.models.huggingface.fields import DECODER_SIZES, SILU, Fields, FieldTable, Letters, Values, names
from megatron_ext.models.huggingface.moe import SPARSE_FIELDS, local_experts, softmax_experts, sparse_letters
from megatron_ext.models.huggingface.tensors import (
    EXPERT,
    ROUTED_EXPERT,
    Conversion,
    LayerTable,
    Source,
    TensorTable,
    attention,
    gated_mlp,
    query_and_key_norms,
    weights,
)

DECODER_FIELDS = FieldTable(
    sizes=DECODER_SIZES,
    numbers={"rms_norm_eps": ("norm_epsilon", 1e-6)},
    fixed={"hidden_act": SILU},
    read=names("num_key_value_heads head_dim") | ROPE_FIELDS,
)

FEED_FORWARD_NORM = weights({"pre_mlp_layernorm": "post_attention_layernorm"})
ATTENTION_TENSORS = {**weights({"input_layernorm": "input_layernorm"}), **attention("self_attn")}
NORMED_ATTENTION_TENSORS = {**ATTENTION_TENSORS, **query_and_key_norms("self_attn")}
MLP_TENSORS = {**FEED_FORWARD_NORM, **gated_mlp("mlp", "mlp")}


def _decoder_tensors(
    attention: LayerTable, feed_forwards: Mapping[str, LayerTable], split: Mapping[str, str] | None = None
) -> TensorTable:
    """Return a table in which attention has the same tensors with a window and without."""
    layers = {"*": attention, "W": attention, **feed_forwards}
    return TensorTable(layers, split=split or {})


WINDOW = "sliding_window"
_SWITCH, _KINDS, _FIRST = "use_sliding_window", "layer_types", "max_window_layers"
SWITCHED_FIELDS = frozenset((WINDOW, _SWITCH))
LISTED_FIELDS = SWITCHED_FIELDS | names("layer_types max_window_layers")

_WINDOW_LETTERS = {"full_attention": "*", "sliding_attention": "W"}
_DEFAULT_FIRST = 28  # default of transformers


def mixers_alike(fields: Fields) -> str:
    """Return W for all layers if there is a `sliding_window`, * for all if it is null."""
    return ("*" if fields.get(WINDOW) is None else "W") * fields.layer_count


def mixers_if_switched(fields: Fields) -> str:
    """Return the letters as `mixers_alike`, but * for all unless `use_sliding_window` is true."""
    return mixers_alike(fields) if fields.flag(_SWITCH, default=False) else "*" * fields.layer_count


def mixers_listed(fields: Fields) -> str:
    """Return W for the layers that `layer_types` lists as sliding, or for those from `max_window_layers` on.

    Raises:
        ConfigError: Unknown layer kinds, a wrong number of them, or sliding layers without a window length.
    """
    is_on, count, first = fields.flag(_SWITCH, default=False), fields.layer_count, fields.get(_FIRST, _DEFAULT_FIRST)
    if type(first) is not int or first < 0:
        fields.refuse(_FIRST, "it must be a number of layers")
    if fields.get(_KINDS) is None:
        full = min(first, count) if is_on and fields.get(WINDOW) is not None else count
        return "*" * full + "W" * (count - full)
    letters = fields.layer_letters(_KINDS, _WINDOW_LETTERS)
    if "W" in letters and not is_on:
        raise ConfigError(f"config.json: {_KINDS} has 'sliding_attention', and {_SWITCH} is false")
    return letters


def all_of(letter: str) -> Letters:
    """Return a function that gives every layer the same letter."""
    return lambda fields: letter * fields.layer_count


_MLPS, _EXPERTS = all_of("-"), all_of("E")


def decoder_pattern(mixers: Letters, feed_forwards: Letters = _MLPS) -> Letters:
    """Return a pattern function with two letters for each layer of theirs."""
    return lambda fields: "".join(map("".join, zip(mixers(fields), feed_forwards(fields), strict=True)))


def decoder_attention(fields: Fields, *, default_base: int = DEFAULT_BASE) -> dict[str, object]:
    """Return heads, head size and rotary embedding in the fields of `ModelConfig`.

    Args:
        default_base: Base of the rotary embedding, if the file has none.
    """
    rotation = rotary_fields(fields, default_base=default_base)
    return {**attention_heads(fields), **rotated_head_size(fields), **rotation}


def attention_biases(fields: Fields) -> dict[str, object]:
    """Return the biases of all four projections, as `attention_bias` sets them."""
    has_biases = fields.flag("attention_bias", default=False)
    return {"add_qkv_bias": has_biases, "add_attention_output_bias": has_biases}


# Llama, with optional biases of attention and MLPs
LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    fields=DECODER_FIELDS
    | FieldTable(
        fixed={"pretraining_tp": (1, None), WINDOW: (None,), SHARE: (1.0, None)},
        read=names("attention_bias mlp_bias"),
    ),
    pattern=decoder_pattern(all_of("*")),
    tensors=TensorTable(
        layers={"*": ATTENTION_TENSORS, "-": MLP_TENSORS},
        ignored=r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq",  # in older files; derived from the configuration
    ),
    constants={"swiglu": True},
    derived=(
        decoder_attention,
        attention_biases,
        lambda fields: {"add_mlp_bias": fields.flag("mlp_bias", default=False)},
    ),
)

# Qwen2 and Qwen2.5: queries, keys and values have biases
QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    fields=DECODER_FIELDS
    | FieldTable(
        fixed={"dual_chunk_attention_config": (None,)},
        read=LISTED_FIELDS,
        defaults={"num_key_value_heads": 32, WINDOW: 4096},
    ),
    pattern=decoder_pattern(mixers_listed),
    tensors=_decoder_tensors(ATTENTION_TENSORS, {"-": MLP_TENSORS}),
    constants={"swiglu": True, "add_qkv_bias": True},
    derived=(decoder_attention,),
)

# Qwen3: queries and keys have per-head norms
QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    fields=DECODER_FIELDS
    | FieldTable(
        read=LISTED_FIELDS | {"attention_bias"},
        defaults={"num_key_value_heads": 32, "head_dim": 128, WINDOW: 4096},
    ),
    pattern=decoder_pattern(mixers_listed),
    tensors=_decoder_tensors(NORMED_ATTENTION_TENSORS, {"-": MLP_TENSORS}),
    constants={"swiglu": True, "qk_layernorm": True},
    derived=(decoder_attention, attention_biases),
)

# Qwen3-MoE: Qwen3 with experts instead of MLPs, in all layers or in some
_QWEN3_MOE_EXPERT_TENSORS = {
    **FEED_FORWARD_NORM,
    **weights({"mlp.router": "mlp.gate"}),
    **gated_mlp(ROUTED_EXPERT, f"mlp.experts.{EXPERT}"),
}
QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    fields=DECODER_FIELDS
    | FieldTable(
        other_names={"num_local_experts": "num_experts"},
        fixed={"use_qk_norm": (True,)},
        read=SPARSE_FIELDS
        | SWITCHED_FIELDS
        | names("attention_bias num_experts num_experts_per_tok moe_intermediate_size norm_topk_prob"),
        defaults={"num_key_value_heads": 4, WINDOW: 4096},
    ),
    pattern=decoder_pattern(mixers_if_switched, sparse_letters),
    tensors=_decoder_tensors(NORMED_ATTENTION_TENSORS, {"-": MLP_TENSORS, "E": _QWEN3_MOE_EXPERT_TENSORS}),
    constants={"swiglu": True, "qk_layernorm": True},
    derived=(decoder_attention, attention_biases),
    experts=lambda fields: softmax_experts(
        fields, "num_experts", "moe_intermediate_size", is_normalized=fields.flag("norm_topk_prob", default=False)
    ),
)

# Mistral: Llama's layers, with a window in all of them or in none. The window defaults to 4096 tokens if the field is
# absent, as in transformers; "null" disables it.
MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    fields=DECODER_FIELDS | FieldTable(read=names(WINDOW), defaults={"num_key_value_heads": 8, WINDOW: 4096}),
    pattern=decoder_pattern(mixers_alike),
    tensors=_decoder_tensors(ATTENTION_TENSORS, {"-": MLP_TENSORS}),
    constants={"swiglu": True},
    derived=(decoder_attention,),
)

# Mixtral: Mistral's attention, and experts in every layer. An expert is three matrices, w1 (gate), w3 (up) and w2
# (down). Weights of the chosen experts are divided by their sum.
_MIXTRAL_EXPERT_TENSORS = {
    **FEED_FORWARD_NORM,
    **weights({"mlp.router": "block_sparse_moe.gate"}),
    **gated_mlp(ROUTED_EXPERT, f"block_sparse_moe.experts.{EXPERT}", "w1", "w3", "w2"),
}
MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    fields=DECODER_FIELDS
    | FieldTable(
        other_names={"num_experts": "num_local_experts"},
        numbers={"rms_norm_eps": ("norm_epsilon", 1e-5)},
        read=names(f"{WINDOW} num_local_experts num_experts_per_tok"),
        defaults={"num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    pattern=decoder_pattern(mixers_alike, _EXPERTS),
    tensors=_decoder_tensors(ATTENTION_TENSORS, {"E": _MIXTRAL_EXPERT_TENSORS}),
    constants={"swiglu": True},
    derived=(partial(decoder_attention, default_base=1_000_000),),
    experts=local_experts,
)

# gpt-oss, with weights of 16 or 32 bits. OpenAI's own files have experts of 4 bits (MXFP4), which are not read.
# Attention has biases and a sink for each query head, and a sliding window in every second layer, beginning with the
# first; rotary embeddings are stretched by YaRN. Every layer has experts, weighted by a softmax over the chosen ones,
# in four tensors for all of them: matrices with inputs as rows, whose gate and up projection alternate. The gate's
# activation is x * sigmoid(1.702 x); gate and up projection are clamped, and 1 is added to the latter.
_GPT_OSS_ROTATION = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _one_after_the_other(parts: Sequence[Tensor], _: ModelConfig) -> Tensor:
    """Put rows of gate and up projection, which alternate, one after the other: [2 f, ...] -> [2 f, ...]."""
    (rows,) = parts
    return torch.cat([rows[::2], rows[1::2]])


def _alternating(ours: Tensor, _: ModelConfig) -> Sequence[Tensor]:
    return [torch.stack(ours.chunk(2), dim=1).flatten(0, 1)]


_GATE_AND_UP_BIAS = Conversion(lambda config: [2 * config.expert_ffn_size], _one_after_the_other, _alternating)
_GATE_AND_UP = replace(_GATE_AND_UP_BIAS, is_transposed=True)
_DOWN = Conversion(
    lambda config: [config.hidden_size], lambda parts, _: parts[0], lambda ours, _: [ours], is_transposed=True
)

_GPT_OSS_EXPERT = f"mlp.experts.{EXPERT}"
_GPT_OSS_EXPERT_TENSORS = {
    **FEED_FORWARD_NORM,
    **weights({"mlp.router": "mlp.router"}),
    "mlp.router.bias": Source(("mlp.router.bias",)),
    f"{ROUTED_EXPERT}.linear_fc1.weight": Source((f"{_GPT_OSS_EXPERT}.gate_up_proj",), _GATE_AND_UP),
    f"{ROUTED_EXPERT}.linear_fc1.bias": Source((f"{_GPT_OSS_EXPERT}.gate_up_proj_bias",), _GATE_AND_UP_BIAS),
    f"{ROUTED_EXPERT}.linear_fc2.weight": Source((f"{_GPT_OSS_EXPERT}.down_proj",), _DOWN),
    f"{ROUTED_EXPERT}.linear_fc2.bias": Source((f"{_GPT_OSS_EXPERT}.down_proj_bias",)),
}
_BIASED = ("self_attention.linear_qkv.bias", "self_attention.linear_proj.bias")
_GPT_OSS_ATTENTION = {
    **{name: replace(one, needs=None) if name in _BIASED else one for name, one in ATTENTION_TENSORS.items()},
    "self_attention.core_attention.softmax_offset": Source(("self_attn.sinks",)),
}


def _gpt_oss_mixers(fields: Fields) -> str:
    """Return W for layers with a window, * for others: every second one, unless `layer_types` lists them."""
    if fields.get("layer_types") is None:
        return "".join("*" if index % 2 else "W" for index in range(fields.layer_count))
    letters = fields.layer_letters(_KINDS, _WINDOW_LETTERS)
    if "W" in letters and fields.get(WINDOW) is None:
        raise ConfigError(f"config.json: layer_types has 'sliding_attention', and {WINDOW} is null")
    return letters


def _gpt_oss_attention(fields: Fields) -> Values:
    if fields.get("rope_parameters") is None and fields.get("rope_scaling") is None:
        fields = Fields({**fields, "rope_parameters": _GPT_OSS_ROTATION})
    return decoder_attention(fields, default_base=150_000)


GPT_OSS = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    fields=DECODER_FIELDS
    | FieldTable(
        other_names={"num_experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"},
        numbers={"rms_norm_eps": ("norm_epsilon", 1e-5), "swiglu_limit": ("activation_func_clamp_value", 7.0)},
        fixed={"attention_bias": (True,), "swiglu_alpha": (1.702,)},
        read=names(f"{WINDOW} layer_types num_local_experts num_experts_per_tok"),
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            WINDOW: 128,
            "max_position_embeddings": 131072,
        },
    ),
    pattern=decoder_pattern(_gpt_oss_mixers, _EXPERTS),
    tensors=_decoder_tensors(
        _GPT_OSS_ATTENTION,
        {"E": _GPT_OSS_EXPERT_TENSORS},
        split={r"(.*\.mlp\.experts)\.((?:gate_up|down)_proj(?:_bias)?)": r"\1.{index}.\2"},
    ),
    constants={
        "quick_geglu": True,
        "glu_linear_offset": 1.0,
        "softmax_type": "learnable",
        "disable_bias_linear": False,
    },
    derived=(_gpt_oss_attention,),
    experts=local_experts,
)

FAMILIES = (LLAMA, QWEN2, QWEN3, QWEN3_MOE, MISTRAL, MIXTRAL, GPT_OSS)
