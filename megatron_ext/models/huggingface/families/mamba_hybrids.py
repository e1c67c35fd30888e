"""Hybrids of attention and Mamba mixers with an MLP after each: Jamba, Bamba, FalconH1 and Granite 4.

A decoder layer of theirs is two letters of the pattern, each with its norm and its residual: a Mamba mixer or attention
(in FalconH1 both, side by side), and then an MLP or experts ("M-", "ME", "*-", "*E", "P-").
"""

from __future__ import annotations

from functools import partial

from megatron_ext.config.model_fields import GATE_FIRST, NORM_FIRST
from megatron_ext.errors import ConfigError
from megatron_ext.models.huggingface.attention import (
    ROPE_FIELDS,
    SHARE,
    attention_heads,
    rotary_fields,
    rotated_head_size,
)
from megatron_ext.models.huggingface.families.decoders import (
    ATTENTION_TENSORS,
    FEED_FORWARD_NORM,
    all_of,
    decoder_attention,
    decoder_pattern,
)
from megatron_ext.models.huggingface.families.mamba import TIME_STEP_LIMIT, dt_rank
from megatron_ext.models.huggingface.family import Family
from megatron_ext.models.huggingface.fields import (
    ATTENTION_SIZES,
    DECODER_SIZES,
    SILU,
    Fields,
    FieldTable,
    Values,
    names,
)
from megatron_ext.models.huggingface.moe import local_experts, softmax_experts
from megatron_ext.models.huggingface.tensors import (
    EXPERT,
    MAMBA1_TENSORS,
    MAMBA2_TENSORS,
    ROUTED_EXPERT,
    Source,
    TensorTable,
    attention,
    copied,
    gated_mlp,
    plain_mlp,
    weights,
)

_RECURRENT_NORM = weights({"norm": "input_layernorm"})
_MAMBA2_TENSORS = {**_RECURRENT_NORM, **copied("mixer", "mamba", MAMBA2_TENSORS)}
_PRE_NORM = weights({"pre_mlp_layernorm": "pre_ff_layernorm"})
_MLP_TENSORS = {**_PRE_NORM, **gated_mlp("mlp", "feed_forward")}
_DEFAULT_EXPAND = 2

_MAMBA2_FIELDS = FieldTable(
    sizes={
        **ATTENTION_SIZES,
        "mamba_n_heads": "mamba_num_heads",
        "mamba_n_groups": "mamba_num_groups",
        "mamba_d_state": "mamba_state_dim",
        "mamba_d_conv": "mamba_conv_kernel",
        "mamba_chunk_size": "mamba_chunk_size",
    },
    numbers={"rms_norm_eps": ("norm_epsilon", 1e-5)},
    fixed={
        "mamba_conv_bias": (True,),
        "mamba_proj_bias": (False,),
        **TIME_STEP_LIMIT,
        "attention_bias": (False,),
        "hidden_act": SILU,
        "sliding_window": (None,),
    },
    read=names("num_key_value_heads head_dim mamba_d_head mamba_expand") | ROPE_FIELDS,
    defaults={
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
        "mamba_chunk_size": 256,
    },
)


def _mamba2_heads(fields: Fields, width: int | None = None) -> Values:
    """Return the head size, from `mamba_d_head` or the width of the layer.

    Args:
        width: Width of the layer; default: `mamba_expand` times the hidden size.

    Raises:
        ConfigError: The heads do not make up the width, or the groups do not divide the heads.
    """
    fields.check_divides("mamba_n_groups", "mamba_n_heads")
    if width is None:
        width = fields.size("mamba_expand", _DEFAULT_EXPAND) * fields.size("hidden_size")
    heads = fields.size("mamba_n_heads")
    channels = width // heads if fields.get("mamba_d_head", "auto") == "auto" else fields.size("mamba_d_head")
    if channels * heads != width:
        raise ConfigError(
            f"config.json: mamba_n_heads = {heads} of mamba_d_head = {channels} do not make up the {width} channels of "
            "a Mamba layer"
        )
    return {"mamba_head_dim": channels}


# Jamba: Mamba-1 mixers, and attention without positions. Experts are weighted by a softmax over all of them, which is
# not normalized again over the chosen ones.
_JAMBA_EPSILON = 1e-6
# transformers' offset and period of attention and expert layers.
_JAMBA_ATTENTION, _JAMBA_EXPERTS = (4, 8), (1, 2)


def _jamba_mixers(fields: Fields) -> str:
    indices = range(fields.layer_count)
    return "".join("*" if _is_chosen(fields, "attn_layer", index, _JAMBA_ATTENTION) else "M" for index in indices)


def _is_chosen(fields: Fields, name: str, index: int, default: tuple[int, int]) -> bool:
    """Return whether `NAME_offset` and `NAME_period` select layer `index`; `default` are both if absent."""
    offset, period = fields.get(f"{name}_offset", default[0]), fields.size(f"{name}_period", default[1])
    if type(offset) is not int or not 0 <= offset < period:
        fields.refuse(f"{name}_offset", f"it must be at least 0 and less than {name}_period = {period}")
    return index % period == offset


def _jamba_feed_forwards(fields: Fields) -> str:
    indices, has_experts = range(fields.layer_count), fields.size("num_experts") > 1
    return "".join(
        "E" if has_experts and _is_chosen(fields, "expert_layer", index, _JAMBA_EXPERTS) else "-" for index in indices
    )


def _jamba_sizes(fields: Fields) -> Values:
    fields.check_divides("num_attention_heads", "hidden_size")
    return {
        "mamba_inner_size": fields.size("hidden_size") * fields.size("mamba_expand"),
        "mamba_dt_rank": dt_rank(fields, "mamba_dt_rank"),
        "mamba_inner_norm_epsilon": fields.number("rms_norm_eps", default=_JAMBA_EPSILON),
    }


JAMBA = Family(
    model_type="jamba",
    architecture="JambaForCausalLM",
    fields=FieldTable(
        other_names={"num_local_experts": "num_experts"},
        sizes={**DECODER_SIZES, "mamba_d_state": "mamba_state_dim", "mamba_d_conv": "mamba_conv_kernel"},
        numbers={"rms_norm_eps": ("norm_epsilon", _JAMBA_EPSILON)},
        fixed={
            "hidden_act": SILU,
            "mamba_proj_bias": (False,),
            "mamba_conv_bias": (True,),
            "mamba_inner_layernorms": (True,),
            "sliding_window": (None,),
            "rope_scaling": (None,),
        },
        read=names(
            """
            num_key_value_heads mamba_expand mamba_dt_rank num_experts num_experts_per_tok layers_block_type
            attn_layer_period attn_layer_offset expert_layer_period expert_layer_offset
            """
        ),
        defaults={
            "max_position_embeddings": 262144,
            "num_key_value_heads": 8,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_expand": _DEFAULT_EXPAND,
            "num_experts": 16,
            "num_experts_per_tok": 2,
        },
    ),
    pattern=decoder_pattern(_jamba_mixers, _jamba_feed_forwards),
    tensors=TensorTable(
        layers={
            "M": {
                **_RECURRENT_NORM,
                **copied("mixer", "mamba", MAMBA1_TENSORS),
                **weights({f"mixer.{one}_layernorm": f"mamba.{one}_layernorm" for one in ("dt", "b", "c")}),
            },
            "*": ATTENTION_TENSORS,
            "-": _MLP_TENSORS,
            "E": {
                **_PRE_NORM,
                **weights({"mlp.router": "feed_forward.router"}),
                **gated_mlp(ROUTED_EXPERT, f"feed_forward.experts.{EXPERT}"),
            },
        },
        final_norm="final_layernorm.weight",
    ),
    constants={"recurrent_layer": "mamba1", "mamba_inner_norm": "weighted", "swiglu": True},
    derived=(attention_heads, _jamba_sizes),
    experts=lambda fields: softmax_experts(fields, "num_experts", "intermediate_size", is_normalized=False),
)

# Bamba. transformers rotates half of each head, unless the rotary parameters set another share, and ignores
# `attn_rotary_emb` of published files, which is the same number in channels.
_BAMBA_SHARE = 0.5


def _bamba_mixers(fields: Fields) -> str:
    attending = fields.layer_numbers("attn_layer_indices")
    return "".join("*" if index in attending else "M" for index in range(fields.layer_count))


BAMBA = Family(
    model_type="bamba",
    architecture="BambaForCausalLM",
    fields=_MAMBA2_FIELDS
    | FieldTable(
        sizes=DECODER_SIZES,
        fixed={
            "mlp_bias": (False,),
            SHARE: (_BAMBA_SHARE, None),  # transformers ignores another share outside of the rotary parameters
        },
        read=names("attn_layer_indices attn_rotary_emb"),
        defaults={"max_position_embeddings": 262144, "num_key_value_heads": 8},
    ),
    pattern=decoder_pattern(_bamba_mixers),
    tensors=TensorTable(
        layers={"M": _MAMBA2_TENSORS, "*": ATTENTION_TENSORS, "-": _MLP_TENSORS},
        final_norm="final_layernorm.weight",
    ),
    constants={"swiglu": True},
    derived=(attention_heads, rotated_head_size, partial(rotary_fields, default_share=_BAMBA_SHARE), _mamba2_heads),
)

# FalconH1. Its multipliers become ours:
# - `ssm_in_multiplier` times each of `ssm_multipliers`: the factors of z, x, B, C and dt;
# - `attention_in_multiplier` a and `key_multiplier` k: attention is linear in its values and has no biases, so its
#   output is multiplied by a, and queries times keys by a * a * k;
# - the first of `mlp_multipliers` is applied before the gate's activation, the second after the MLP.
_FALCON_H1_WIDTH = 1024  # default of transformers' `mamba_d_ssm`; null is `mamba_expand` times the width


def _falcon_h1_mixer(fields: Fields) -> Values:
    width = fields.size("mamba_d_ssm", _FALCON_H1_WIDTH) if fields.get("mamba_d_ssm", 0) is not None else None
    has_norm = fields.flag("mamba_rms_norm", default=False)
    is_norm_first = fields.flag("mamba_norm_before_gate", default=True)
    norm = (NORM_FIRST if is_norm_first else GATE_FIRST) if has_norm else None
    return {**_mamba2_heads(fields, width), "mamba_gated_norm": norm}


def _falcon_h1_multipliers(fields: Fields) -> Values:
    inputs, keys, outputs, ssm_inputs = (
        fields.number(name, default=1.0)
        for name in ("attention_in_multiplier", "key_multiplier", "attention_out_multiplier", "ssm_in_multiplier")
    )
    gate, down = _multipliers(fields, "mlp_multipliers", 2)
    channels = rotated_head_size(fields)["kv_channels"]
    assert isinstance(channels, int), channels
    return {
        "softmax_scale": channels**-0.5 * inputs * inputs * keys,
        "attention_output_multiplier": inputs * outputs,
        "mamba_multipliers": tuple(ssm_inputs * one for one in _multipliers(fields, "ssm_multipliers", 5)),
        "mlp_gate_multiplier": gate,
        "mlp_output_multiplier": down,
    }


def _multipliers(fields: Fields, name: str, count: int) -> list[float]:
    """Return a list of multipliers; ones if it is null or absent."""
    listed = fields.get(name)
    if listed is None:
        return [1.0] * count
    if not isinstance(listed, list) or len(listed) != count:
        fields.refuse(name, f"it must be a list of {count} positive numbers")
    return [Fields({name: one}).number(name) for one in listed]


FALCON_H1 = Family(
    model_type="falcon_h1",
    architecture="FalconH1ForCausalLM",
    fields=_MAMBA2_FIELDS
    | FieldTable(
        sizes=DECODER_SIZES,
        numbers={
            "embedding_multiplier": ("embedding_multiplier", 1.0),
            "lm_head_multiplier": ("logits_multiplier", 1.0),
            "ssm_out_multiplier": ("recurrent_output_multiplier", 1.0),
        },
        fixed={
            "mlp_bias": (False,),
            "projectors_bias": (False,),
            "mamba_use_mlp": (True,),
            "attn_layer_indices": (None,),
            SHARE: (1.0, None),
        },
        read=names(
            """
            mamba_d_ssm mamba_rms_norm mamba_norm_before_gate mlp_multipliers ssm_multipliers key_multiplier
            attention_in_multiplier attention_out_multiplier ssm_in_multiplier
            """
        ),
        defaults={"max_position_embeddings": 8192, "num_key_value_heads": 8},
    ),
    pattern=decoder_pattern(all_of("P")),
    tensors=TensorTable(
        layers={
            "P": {
                **_MAMBA2_TENSORS,
                "mixer.norm.weight": Source(("mamba.norm.weight",), needs="mamba_gated_norm"),
                **attention("self_attn"),
            },
            "-": _MLP_TENSORS,
        },
        final_norm="final_layernorm.weight",
    ),
    constants={"swiglu": True},
    derived=(decoder_attention, _falcon_h1_mixer, _falcon_h1_multipliers),
)

# Granite 4, GraniteMoeHybrid: an MLP, or experts with a shared one, weighted by a softmax over the chosen ones. Fields
# with names of their own:
# - `attention_multiplier` is the scale of queries times keys, `logits_scaling` the divisor of logits;
# - `shared_intermediate_size` is the width of the shared expert, and of the MLP if there are no experts;
# - `position_embedding_type` other than "rope" means no positions.
_GRANITE_KINDS = {"linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*"}
_GRANITE_EXPERTS = "block_sparse_moe"
_GRANITE_MATRICES = ("input_linear", "output_linear")  # the first is gate and up projection, as in ours


def _granite_mixers(fields: Fields) -> str:
    is_listed = fields.get("layer_types") is not None
    return fields.layer_letters("layer_types", _GRANITE_KINDS) if is_listed else "M" * fields.layer_count


def _granite_feed_forwards(fields: Fields) -> str:
    return ("-" if fields["num_local_experts"] in (0, None) else "E") * fields.layer_count


def _granite_attention(fields: Fields) -> Values:
    found = decoder_attention(fields)  # rotary parameters are checked even if they are unused
    if fields.get("position_embedding_type") == "rope":
        return found
    return {**attention_heads(fields), **rotated_head_size(fields), "position_embedding_type": "none"}


def _granite_experts(fields: Fields) -> Values:
    return {**local_experts(fields), "moe_shared_expert_intermediate_size": fields.size("shared_intermediate_size")}


GRANITE_MOE_HYBRID = Family(
    model_type="granitemoehybrid",
    architecture="GraniteMoeHybridForCausalLM",
    fields=_MAMBA2_FIELDS
    | FieldTable(
        other_names={"layers_block_type": "layer_types"},
        sizes={"shared_intermediate_size": "ffn_hidden_size"},
        numbers={
            "rms_norm_eps": ("norm_epsilon", 1e-6),
            "embedding_multiplier": ("embedding_multiplier", 1.0),
            "residual_multiplier": ("residual_multiplier", 1.0),
            "attention_multiplier": ("softmax_scale", 1.0),
        },
        fixed={"normalization_function": ("rmsnorm",), "position_embedding_type": (None, "nope", "rope")},
        read=names("layer_types logits_scaling intermediate_size num_local_experts num_experts_per_tok"),
        defaults={
            "max_position_embeddings": 2048,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 1024,
            "intermediate_size": 11008,
        },
    ),
    pattern=decoder_pattern(_granite_mixers, _granite_feed_forwards),
    tensors=TensorTable(
        layers={
            "M": _MAMBA2_TENSORS,
            "*": ATTENTION_TENSORS,
            "-": {**FEED_FORWARD_NORM, **plain_mlp("mlp", "shared_mlp", *_GRANITE_MATRICES)},
            "E": {
                **FEED_FORWARD_NORM,
                **weights({"mlp.router": f"{_GRANITE_EXPERTS}.router.layer"}),
                **plain_mlp("mlp.shared_experts", "shared_mlp", *_GRANITE_MATRICES),
                **plain_mlp(ROUTED_EXPERT, f"{_GRANITE_EXPERTS}.experts.{EXPERT}", *_GRANITE_MATRICES),
            },
        },
        split={
            rf"(.*\.{_GRANITE_EXPERTS})\.(input_linear|output_linear)\.weight": r"\1.experts.{index}.\2.weight",
            # Names that transformers uses in memory.
            rf"(.*\.{_GRANITE_EXPERTS}\.experts)\.gate_up_proj": r"\1.{index}.input_linear.weight",
            rf"(.*\.{_GRANITE_EXPERTS}\.experts)\.down_proj": r"\1.{index}.output_linear.weight",
        },
        other_names={rf"(.*\.{_GRANITE_EXPERTS}\.router)\.weight": r"\1.layer.weight"},
    ),
    constants={"swiglu": True},
    derived=(
        _granite_attention,
        _mamba2_heads,
        lambda fields: {"logits_multiplier": 1.0 / fields.number("logits_scaling", default=1.0)},
    ),
    experts=_granite_experts,
)

FAMILIES = (JAMBA, BAMBA, FALCON_H1, GRANITE_MOE_HYBRID)
