"""LFM2 checkpoints of Hugging Face, dense or with mixtures of experts.

A decoder layer of theirs is two letters of the pattern, a short convolution or attention and then an MLP or experts
("M-", "*-", "ME", "*E"), each with its norm and its residual. Notes:

- The width of a dense model's MLP is `intermediate_size` (`block_ff_dim`), or, with `block_auto_adjust_ff_dim`, two
  thirds of that times `block_ffn_dim_multiplier`, rounded up to a multiple of `block_multiple_of`.
- The norm after the last layer is called `embedding_norm`.
- Published files give some sizes several times; they must agree.
- Experts come after the first `num_dense_layers` layers, whose MLPs have a width of `intermediate_size` itself. Routers
  compute sigmoid scores, choose by score plus bias and weight by the score.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from megatron_ext.errors import ConfigError
from megatron_ext.models.huggingface.attention import ROPE_FIELDS
from megatron_ext.models.huggingface.families.decoders import decoder_attention, decoder_pattern
from megatron_ext.models.huggingface.family import Family
from megatron_ext.models.huggingface.fields import ATTENTION_SIZES, Fields, FieldTable, Values, names
from megatron_ext.models.huggingface.moe import check_normalization, routed_experts
from megatron_ext.models.huggingface.tensors import (
    EXPERT,
    ROUTED_EXPERT,
    Joined,
    Source,
    TensorTable,
    attention,
    copied,
    gated_mlp,
    plain_mlp,
    weights,
)

_KINDS = {"conv": "M", "full_attention": "*"}

_FIELDS = FieldTable(
    other_names={
        "block_dim": "hidden_size",
        "conv_dim": "hidden_size",
        "conv_dim_out": "hidden_size",
        "block_ff_dim": "intermediate_size",
        "block_norm_eps": "norm_eps",
        "num_heads": "num_attention_heads",
        "theta": "rope_theta",
        "tie_embedding": "tie_word_embeddings",
    },
    sizes={**ATTENTION_SIZES, "conv_L_cache": "short_conv_kernel_dim"},
    numbers={"norm_eps": ("norm_epsilon", 1e-5)},
    fixed={"conv_bias": (False,), "block_use_swiglu": (True,), "use_pos_enc": (True,), "sliding_window": (None,)},
    read=names("num_key_value_heads head_dim layer_types") | ROPE_FIELDS,
    defaults={
        "max_position_embeddings": 128_000,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 65536,
        "conv_L_cache": 3,
    },
    is_tied=True,
)

_FEED_FORWARD_NORM = weights({"pre_mlp_layernorm": "ffn_norm"})
_TENSORS = TensorTable(
    layers={
        "M": {
            **weights({"norm": "operator_norm", "mixer.conv1d": "conv.conv"}),
            **copied("mixer", "conv", "in_proj.weight out_proj.weight"),
        },
        "*": {
            "self_attention.linear_qkv.weight": attention("self_attn")["self_attention.linear_qkv.weight"],
            **weights({"input_layernorm": "operator_norm", "self_attention.linear_proj": "self_attn.out_proj"}),
            **weights({f"self_attention.{one}_layernorm": f"self_attn.{one}_layernorm" for one in "qk"}),
        },
        "-": {**_FEED_FORWARD_NORM, **gated_mlp("mlp", "feed_forward", "w1", "w3", "w2")},
    },
    final_norm="embedding_norm.weight",
)


def _mixers(fields: Fields) -> str:
    """Return the letters of mixers, from the list of layer kinds, the list of attention layers, or both if equal."""
    count, listed = fields.layer_count, fields.get("full_attn_idxs")
    attending = fields.layer_numbers("full_attn_idxs")
    by_index = "".join("*" if index in attending else "M" for index in range(count))
    if fields.get("layer_types") is None:
        return "*" * count if listed is None else by_index
    mixers = fields.layer_letters("layer_types", _KINDS)
    if listed is not None and mixers != by_index:
        raise ConfigError(f"config.json: full_attn_idxs = {listed!r} contradicts layer_types {fields['layer_types']!r}")
    return mixers


def _ffn_size(fields: Fields) -> int:
    width = fields.size("intermediate_size")
    if not fields.flag("block_auto_adjust_ff_dim", default=True):
        return width
    width, factor = 2 * width // 3, fields.get("block_ffn_dim_multiplier", 1.0)
    if factor is None:
        return width
    multiple = fields.size("block_multiple_of", 256)
    width = int(fields.number("block_ffn_dim_multiplier", default=1.0) * width)
    return -(-width // multiple) * multiple


_attention = partial(decoder_attention, default_base=1_000_000)

LFM2 = Family(
    model_type="lfm2",
    architecture="Lfm2ForCausalLM",
    fields=_FIELDS
    | FieldTable(
        read=names(
            "full_attn_idxs intermediate_size block_auto_adjust_ff_dim block_ffn_dim_multiplier block_multiple_of"
        ),
        defaults={"hidden_size": 2560, "intermediate_size": 12288},
    ),
    pattern=decoder_pattern(_mixers),
    tensors=_TENSORS,
    constants={"recurrent_layer": "short_conv", "swiglu": True, "qk_layernorm": True},
    derived=(_attention, lambda fields: {"ffn_hidden_size": _ffn_size(fields)}),
)

_EXPERTS = "feed_forward.experts"


def _feed_forwards(fields: Fields) -> str:
    count, dense = fields.layer_count, fields["num_dense_layers"]
    if type(dense) is not int or not 0 <= dense <= count:
        fields.refuse("num_dense_layers", f"it must be 0 to {count}")
    return "-" * dense + "E" * (count - dense)


def _experts(fields: Fields) -> Values:
    check_normalization(fields.flag("norm_topk_prob", default=True), fields.size("num_experts_per_tok"))
    return {
        **routed_experts(fields, "num_experts"),
        "moe_ffn_hidden_size": fields.size("moe_intermediate_size"),
        "moe_router_score_function": "sigmoid",
        "moe_router_topk_scaling_factor": fields.number("routed_scaling_factor", default=1.0),
        "moe_router_enable_expert_bias": fields.flag("use_expert_bias", default=True),
    }


LFM2_MOE = replace(
    LFM2,
    model_type="lfm2_moe",
    architecture="Lfm2MoeForCausalLM",
    fields=_FIELDS
    | FieldTable(
        sizes={"intermediate_size": "ffn_hidden_size"},
        read=names(
            """
            num_dense_layers num_experts num_experts_per_tok moe_intermediate_size use_expert_bias norm_topk_prob
            routed_scaling_factor
            """
        ),
        defaults={
            "hidden_size": 2048,
            "intermediate_size": 7168,
            "moe_intermediate_size": 1792,
            "num_dense_layers": 2,
            "num_experts": 32,
            "num_experts_per_tok": 4,
        },
    ),
    pattern=decoder_pattern(lambda fields: fields.layer_letters("layer_types", _KINDS), _feed_forwards),
    tensors=replace(
        _TENSORS,
        layers={
            **_TENSORS.layers,
            "E": {
                **_FEED_FORWARD_NORM,
                **weights({"mlp.router": "feed_forward.gate"}),
                **plain_mlp(ROUTED_EXPERT, f"{_EXPERTS}.{EXPERT}", "gate_up_proj", "w2"),
                "mlp.router.expert_bias": Source(("feed_forward.expert_bias",), needs="moe_router_enable_expert_bias"),
            },
        },
        split={
            rf"(.*\.{_EXPERTS})\.gate_up_proj": r"\1.{index}.gate_up_proj.weight",
            rf"(.*\.{_EXPERTS})\.down_proj": r"\1.{index}.w2.weight",
        },
        joined=(Joined(rf".*\.{_EXPERTS}\.\d+", "gate_up_proj.weight", ("w1.weight", "w3.weight")),),
    ),
    derived=(_attention,),
    experts=_experts,
)

FAMILIES = (LFM2, LFM2_MOE)
