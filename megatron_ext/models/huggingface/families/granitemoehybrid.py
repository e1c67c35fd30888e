"""Granite 4 checkpoints of Hugging Face, GraniteMoeHybrid.

A decoder layer of theirs is two letters of the pattern: a Mamba-2 mixer or attention, then an MLP (-), or experts with
a shared one (E), each with its norm and its residual. Fields with names of their own:

- `attention_multiplier` is the scale of queries times keys, `logits_scaling` the divisor of logits;
- `shared_intermediate_size` is the width of the shared expert, and of the MLP if there are no experts;
- `position_embedding_type` other than "rope" means no positions.

Experts are weighted by a softmax over the chosen ones.
"""

from __future__ import annotations

from megatron_ext.errors import ConfigError
from megatron_ext.models.huggingface.attention import attention_heads, rotated_head_size
from megatron_ext.models.huggingface.blocks import (
    ATTENTION_NORM,
    MLP,
    MLP_NORM,
    RECURRENT_NORM,
    ROUTED_EXPERT,
    SHARED_EXPERTS,
    attention,
    mamba2_mixer,
    weights,
)
from megatron_ext.models.huggingface.family import Family
from megatron_ext.models.huggingface.field_table import DECODER_SIZES, SILU, FieldTable
from megatron_ext.models.huggingface.fields import Fields, layer_count, names, positive_number, size
from megatron_ext.models.huggingface.layer_letters import check_count, listed_letters
from megatron_ext.models.huggingface.mamba2 import (
    MAMBA2_DEFAULTS,
    MAMBA2_FIXED,
    MAMBA2_READ,
    MAMBA2_SIZES,
    mamba2_heads,
)
from megatron_ext.models.huggingface.moe import routed_experts
from megatron_ext.models.huggingface.rotary_fields import ROPE_FIELDS, rotary_fields
from megatron_ext.models.huggingface.tensors import EXPERT, TensorTable

_LETTERS = {"linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*"}
_POSITIONS = (None, "nope", "rope")

_FIELDS = FieldTable(
    other_names={"layers_block_type": "layer_types"},
    sizes={**{theirs: ours for theirs, ours in DECODER_SIZES.items() if theirs != "intermediate_size"}, **MAMBA2_SIZES},
    numbers={
        "rms_norm_eps": ("norm_epsilon", 1e-6),
        "embedding_multiplier": ("embedding_multiplier", 1.0),
        "residual_multiplier": ("residual_multiplier", 1.0),
        "attention_multiplier": ("softmax_scale", 1.0),
    },
    fixed={
        **MAMBA2_FIXED,
        "attention_bias": (False,),
        "hidden_act": SILU,
        "normalization_function": ("rmsnorm",),
        "position_embedding_type": _POSITIONS,
        "sliding_window": (None,),
    },
    read=names(
        """
        num_key_value_heads head_dim layer_types logits_scaling intermediate_size shared_intermediate_size
        num_local_experts num_experts_per_tok
        """
    )
    | ROPE_FIELDS
    | MAMBA2_READ,
    defaults={
        **MAMBA2_DEFAULTS,
        "max_position_embeddings": 2048,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 1024,
        "intermediate_size": 11008,
    },
)

_MIXER_NORM, _FEED_FORWARD_NORM = "input_layernorm", "post_attention_layernorm"
_EXPERTS = "block_sparse_moe"


def _fused_mlp(ours: str, theirs: str) -> dict[str, str]:
    return {f"{ours}.linear_fc1": f"{theirs}.input_linear", f"{ours}.linear_fc2": f"{theirs}.output_linear"}


_TENSORS = TensorTable(
    layers={
        "M": {**weights({RECURRENT_NORM: _MIXER_NORM}), **mamba2_mixer("mamba")},
        "*": {**weights({ATTENTION_NORM: _MIXER_NORM}), **attention("self_attn")},
        # Gate and up projection are one matrix on both sides, the gate first.
        "-": weights({MLP_NORM: _FEED_FORWARD_NORM, **_fused_mlp(MLP, "shared_mlp")}),
        "E": weights(
            {
                MLP_NORM: _FEED_FORWARD_NORM,
                "mlp.router": f"{_EXPERTS}.router.layer",
                **_fused_mlp(SHARED_EXPERTS, "shared_mlp"),
                **_fused_mlp(ROUTED_EXPERT, f"{_EXPERTS}.experts.{EXPERT}"),
            }
        ),
    },
    letters_per_layer=2,
    split={
        rf"(.*\.{_EXPERTS})\.(input_linear|output_linear)\.weight": r"\1.experts.{index}.\2.weight",
        # Names that transformers uses in memory.
        rf"(.*\.{_EXPERTS}\.experts)\.gate_up_proj": r"\1.{index}.input_linear.weight",
        rf"(.*\.{_EXPERTS}\.experts)\.down_proj": r"\1.{index}.output_linear.weight",
    },
    other_names={rf"(.*\.{_EXPERTS}\.router)\.weight": r"\1.layer.weight"},
)


def _pattern(fields: Fields) -> str:
    count = layer_count(fields)
    mixers = "M" * count if fields.get("layer_types") is None else listed_letters(fields, "layer_types", _LETTERS)
    check_count(count, mixers, "layer_types")
    feed_forward = "-" if fields["num_local_experts"] in (0, None) else "E"
    return "".join(mixer + feed_forward for mixer in mixers)


def _derived(fields: Fields) -> Fields:
    rotary = rotary_fields(fields)  # checked even if they are unused
    if fields.get("position_embedding_type") != "rope":
        rotary = {"position_embedding_type": "none"}
    return {
        **attention_heads(fields),
        **rotated_head_size(fields),
        **rotary,
        **mamba2_heads(fields),
        "ffn_hidden_size": size(fields, "shared_intermediate_size"),
        "logits_multiplier": 1.0 / positive_number(fields, "logits_scaling", default=1.0),
    }


def _experts(fields: Fields) -> Fields:
    routed = routed_experts(fields, "num_local_experts")
    if routed["moe_router_topk"] == 1:
        raise ConfigError(
            "config.json: num_experts_per_tok = 1 is not supported; megatron-core's softmax is over two chosen experts "
            "or more"
        )
    return {
        **routed,
        "moe_ffn_hidden_size": size(fields, "intermediate_size"),
        "moe_shared_expert_intermediate_size": size(fields, "shared_intermediate_size"),
        "moe_router_score_function": "softmax",
    }


GRANITE_MOE_HYBRID = Family(
    model_type="granitemoehybrid",
    architecture="GraniteMoeHybridForCausalLM",
    fields=_FIELDS,
    pattern=_pattern,
    tensors=_TENSORS,
    constants={"swiglu": True},
    derived=_derived,
    experts=_experts,
)
