"""Jamba checkpoints of Hugging Face.

A decoder layer of theirs is two letters of the pattern, a Mamba-1 mixer or attention and then an MLP or experts ("M-",
"ME", "*-", "*E"), each with its norm and its residual. Attention has no positions. Experts are weighted by a softmax
over all of them, which is not normalized again over the chosen ones.
"""

from __future__ import annotations

from megatron_ext.errors import ConfigError
from megatron_ext.models.huggingface.attention import attention_heads
from megatron_ext.models.huggingface.blocks import (
    ATTENTION_NORM,
    MLP,
    MLP_NORM,
    RECURRENT_NORM,
    ROUTED_EXPERT,
    attention,
    gated_mlp,
    mamba1_mixer,
    weights,
)
from megatron_ext.models.huggingface.expert_routing import softmax_experts
from megatron_ext.models.huggingface.families.mamba import dt_rank
from megatron_ext.models.huggingface.family import Family
from megatron_ext.models.huggingface.field_table import DECODER_SIZES, SILU, FieldTable
from megatron_ext.models.huggingface.fields import Fields, check_divides, layer_count, names, positive_number, size
from megatron_ext.models.huggingface.layer_letters import is_singled_out
from megatron_ext.models.huggingface.tensors import EXPERT, TensorTable

_KINDS = {"M": "mamba", "*": "attention"}
_DEFAULT_EPSILON = 1e-6
# transformers' offset and period of attention and expert layers.
_ATTENTION, _EXPERTS = (4, 8), (1, 2)

_FIELDS = FieldTable(
    other_names={"num_local_experts": "num_experts"},
    sizes={**DECODER_SIZES, "mamba_d_state": "mamba_state_dim", "mamba_d_conv": "mamba_conv_kernel"},
    numbers={"rms_norm_eps": ("norm_epsilon", _DEFAULT_EPSILON)},
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
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "num_experts": 16,
        "num_experts_per_tok": 2,
    },
)

_MIXER_NORM, _FEED_FORWARD_NORM = "input_layernorm", "pre_ff_layernorm"
_TENSORS = TensorTable(
    layers={
        "M": {
            **weights({RECURRENT_NORM: _MIXER_NORM}),
            **mamba1_mixer("mamba"),
            **weights({f"mixer.{one}_layernorm": f"mamba.{one}_layernorm" for one in ("dt", "b", "c")}),
        },
        "*": {**weights({ATTENTION_NORM: _MIXER_NORM}), **attention("self_attn")},
        "-": {**weights({MLP_NORM: _FEED_FORWARD_NORM}), **gated_mlp(MLP, "feed_forward")},
        "E": {
            **weights({MLP_NORM: _FEED_FORWARD_NORM, "mlp.router": "feed_forward.router"}),
            **gated_mlp(ROUTED_EXPERT, f"feed_forward.experts.{EXPERT}"),
        },
    },
    letters_per_layer=2,
    final_norm="final_layernorm.weight",
)


def _pattern(fields: Fields) -> str:
    """Return two letters a layer; some files also list the kinds of mixers."""
    indices, has_experts = range(layer_count(fields)), size(fields, "num_experts") > 1
    mixers = ["*" if is_singled_out(fields, "attn_layer", index, _ATTENTION) else "M" for index in indices]
    feed_forwards = [
        "E" if has_experts and is_singled_out(fields, "expert_layer", index, _EXPERTS) else "-" for index in indices
    ]
    kinds = [_KINDS[letter] for letter in mixers]
    if fields.get("layers_block_type") not in (None, kinds):
        raise ConfigError(
            f"config.json: layers_block_type {fields['layers_block_type']!r} contradicts attn_layer_period and "
            f"attn_layer_offset, which make it {kinds!r}"
        )
    return "".join(map("".join, zip(mixers, feed_forwards, strict=True)))


def _derived(fields: Fields) -> Fields:
    heads = attention_heads(fields)
    check_divides(fields, "num_attention_heads", "hidden_size")
    return {
        **heads,
        "mamba_inner_size": size(fields, "hidden_size") * size(fields, "mamba_expand"),
        "mamba_dt_rank": dt_rank(fields, "mamba_dt_rank"),
        "mamba_inner_norm_epsilon": positive_number(fields, "rms_norm_eps", default=_DEFAULT_EPSILON),
    }


def _experts(fields: Fields) -> Fields:
    return {
        **softmax_experts(fields, "num_experts", is_normalized=False),
        "moe_ffn_hidden_size": size(fields, "intermediate_size"),
    }


JAMBA = Family(
    model_type="jamba",
    architecture="JambaForCausalLM",
    fields=_FIELDS,
    pattern=_pattern,
    tensors=_TENSORS,
    constants={"recurrent_layer": "mamba1", "mamba_inner_norm": "weighted", "swiglu": True},
    derived=_derived,
    experts=_experts,
)
