"""Qwen3-Next checkpoints of Hugging Face.

A decoder layer of theirs is two letters of the pattern: a gated delta net (M) or attention (*), then an MLP (-) or
experts (E), each with its norm and its residual. Differences in the tensors:

- Theirs store the input projection of a gated delta net in two matrices whose rows are grouped by key head; ours in
  one, [q | k | v | gate | beta | alpha], see `_input_projection`.
- Norms multiply by 1 + weight on both sides (`apply_layernorm_1p`), except theirs inside the gated delta net.
- Both route by a softmax, over the chosen experts if `norm_topk_prob` is true, over all of them otherwise.

The layer of multi-token prediction (`mtp.`), which transformers skips, is one decoder layer with attention.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_ext.config import ModelConfig
from megatron_ext.models.huggingface.attention import attention_heads
from megatron_ext.models.huggingface.blocks import (
    ATTENTION_NORM,
    MLP,
    MLP_NORM,
    RECURRENT_NORM,
    ROUTED_EXPERT,
    SHARED_EXPERTS,
    attention,
    copied,
    gated_mlp,
    query_and_key_norms,
    weights,
)
from megatron_ext.models.huggingface.expert_routing import SPARSE_FIELDS, softmax_experts, sparse_letters
from megatron_ext.models.huggingface.family import Family
from megatron_ext.models.huggingface.field_table import DECODER_SIZES, SILU, FieldTable
from megatron_ext.models.huggingface.fields import (
    Fields,
    check_divides,
    flag,
    names,
    size,
    size_or,
)
from megatron_ext.models.huggingface.gated_delta_net import (
    DELTA_NET_SIZES,
    QWEN_PREDICTION,
    delta_net_or_attention,
    norm_around_one,
)
from megatron_ext.models.huggingface.rotary_fields import ROPE_FIELDS, SHARE, rotary_fields
from megatron_ext.models.huggingface.tensors import EXPERT, Conversion, Source, TensorTable

# transformers' defaults of absent fields.
_DEFAULT_ROTARY_SHARE = 0.25
_DEFAULT_HEAD_SIZE = 256

_EXPERT_SIZES = {
    "moe_intermediate_size": "moe_ffn_hidden_size",
    "shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
}

_FIELDS = FieldTable(
    sizes={
        **DECODER_SIZES,
        **DELTA_NET_SIZES,
        "num_key_value_heads": "num_query_groups",
    },
    numbers={"rms_norm_eps": ("norm_epsilon", 1e-6)},
    fixed={
        "attention_bias": (False,),
        "hidden_act": SILU,
        "sliding_window": (None,),
        "use_sliding_window": (False,),
    },
    read=names(
        """
        head_dim layer_types full_attention_interval norm_topk_prob num_experts num_experts_per_tok
        """
    )
    | ROPE_FIELDS
    | SPARSE_FIELDS
    | {SHARE, *_EXPERT_SIZES},
)


def _pattern(fields: Fields) -> str:
    """Return two letters a layer."""
    return "".join(map("".join, zip(delta_net_or_attention(fields), sparse_letters(fields), strict=True)))


def _derived(fields: Fields) -> Fields:
    check_divides(fields, "linear_num_key_heads", "linear_num_value_heads")
    return {
        **attention_heads(fields),
        "kv_channels": size_or(fields, "head_dim", _DEFAULT_HEAD_SIZE),
        **rotary_fields(fields, default_share=_DEFAULT_ROTARY_SHARE),
    }


def _experts(fields: Fields) -> Fields:
    return {
        **softmax_experts(fields, "num_experts", is_normalized=flag(fields, "norm_topk_prob", default=True)),
        **{ours: size(fields, theirs) for theirs, ours in _EXPERT_SIZES.items()},
        "moe_shared_expert_gate": True,
    }


def _input_projection(parts: Sequence[Tensor], config: ModelConfig) -> Tensor:
    """Regroup rows [q k v z] by key head, and [beta alpha] by key head -> all of q, of k, of v, of z, beta, alpha."""
    qkvz, ba = (part.unflatten(0, (config.linear_num_key_heads, -1)) for part in parts)  # [key heads, rows, h]
    shared = config.linear_num_value_heads // config.linear_num_key_heads
    keys, values = config.linear_key_head_dim, shared * config.linear_value_head_dim
    sections = [*qkvz.split([keys, keys, values, values], dim=1), *ba.split([shared, shared], dim=1)]
    return torch.cat([section.flatten(0, 1) for section in sections])


def _separate_input(ours: Tensor, config: ModelConfig) -> Sequence[Tensor]:
    """Regroup all of q, of k, of v, of z, beta, alpha -> rows [q k v z] by key head, and [beta alpha] by key head."""
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    heads = config.linear_num_value_heads
    parts = ours.split([keys, keys, values, values, heads, heads])
    by_head = [part.unflatten(0, (config.linear_num_key_heads, -1)) for part in parts]  # [key heads, rows, h]
    return torch.cat(by_head[:4], dim=1).flatten(0, 1), torch.cat(by_head[4:], dim=1).flatten(0, 1)


def _input_rows(config: ModelConfig) -> Sequence[int]:
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    return 2 * (keys + values), 2 * config.linear_num_value_heads


_INPUT_PROJECTION = Source(
    ("linear_attn.in_proj_qkvz.weight", "linear_attn.in_proj_ba.weight"),
    Conversion(_input_rows, _input_projection, _separate_input),
)
_MIXER_NORM, _FEED_FORWARD_NORM = "input_layernorm", "post_attention_layernorm"
_TENSORS = TensorTable(
    layers={
        "M": {
            **weights({RECURRENT_NORM: _MIXER_NORM}),
            **copied("mixer", "linear_attn", ("A_log", "dt_bias", "conv1d.weight", "out_proj.weight")),
            "mixer.in_proj.weight": _INPUT_PROJECTION,
            "mixer.out_norm.weight": norm_around_one("linear_attn.norm.weight"),
        },
        "*": {
            **weights({ATTENTION_NORM: _MIXER_NORM}),
            **attention("self_attn"),
            **query_and_key_norms("self_attn"),
        },
        "-": {**weights({MLP_NORM: _FEED_FORWARD_NORM}), **gated_mlp(MLP, "mlp")},
        "E": {
            **weights({MLP_NORM: _FEED_FORWARD_NORM, "mlp.router": "mlp.gate"}),
            **gated_mlp(SHARED_EXPERTS, "mlp.shared_expert"),
            "mlp.shared_experts.gate_weight": Source(("mlp.shared_expert_gate.weight",)),
            **gated_mlp(ROUTED_EXPERT, f"mlp.experts.{EXPERT}"),
        },
    },
    letters_per_layer=2,
    ignored=r"mtp\..*",
    prediction=QWEN_PREDICTION,
)

QWEN3_NEXT = Family(
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    fields=_FIELDS,
    pattern=_pattern,
    tensors=_TENSORS,
    constants={
        "recurrent_layer": "gated_delta_net",
        "qk_layernorm": True,
        "attention_output_gate": True,
        "apply_layernorm_1p": True,
        "swiglu": True,
    },
    derived=_derived,
    experts=_experts,
    prediction=lambda fields: "*E" if "E" in sparse_letters(fields) else "*-",
)
