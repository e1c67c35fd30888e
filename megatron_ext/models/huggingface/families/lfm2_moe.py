"""LFM2 checkpoints of Hugging Face with mixtures of experts.

Like LFM2, but with experts (E) after the first `num_dense_layers` layers. Their routers compute sigmoid scores, choose
by score plus bias and weight by the score. The width of the MLPs is `intermediate_size` itself.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_ext.errors import ConfigError
from megatron_ext.models.huggingface.blocks import MLP_NORM, ROUTED_EXPERT, weights
from megatron_ext.models.huggingface.families.lfm2 import LFM2, heads_and_positions
from megatron_ext.models.huggingface.fields import (
    Fields,
    flag,
    layer_count,
    names,
    positive_number,
    require_field,
    size,
)
from megatron_ext.models.huggingface.layer_letters import check_count, listed_letters
from megatron_ext.models.huggingface.moe import check_normalization, routed_experts
from megatron_ext.models.huggingface.tensors import EXPERT, Joined, Source

_LETTERS = {"conv": "M", "full_attention": "*"}
_ADJUSTED = names(
    "block_auto_adjust_ff_dim block_ffn_dim_multiplier block_multiple_of full_attn_idxs intermediate_size"
)
_DENSE = LFM2.fields

_FIELDS = replace(
    _DENSE,
    sizes={**_DENSE.sizes, "intermediate_size": "ffn_hidden_size"},
    read=_DENSE.read - _ADJUSTED
    | names(
        """
        num_dense_layers num_experts num_experts_per_tok moe_intermediate_size use_expert_bias norm_topk_prob
        routed_scaling_factor
        """
    ),
    defaults={
        **_DENSE.defaults,
        "hidden_size": 2048,
        "intermediate_size": 7168,
        "moe_intermediate_size": 1792,
        "num_dense_layers": 2,
        "num_experts": 32,
        "num_experts_per_tok": 4,
    },
)

_EXPERTS = "feed_forward.experts"
_TENSORS = replace(
    LFM2.tensors,
    layers={
        **LFM2.tensors.layers,
        "E": {
            **weights(
                {
                    MLP_NORM: "ffn_norm",
                    "mlp.router": "feed_forward.gate",
                    f"{ROUTED_EXPERT}.linear_fc1": f"{_EXPERTS}.{EXPERT}.gate_up_proj",
                    f"{ROUTED_EXPERT}.linear_fc2": f"{_EXPERTS}.{EXPERT}.w2",
                }
            ),
            "mlp.router.expert_bias": Source(("feed_forward.expert_bias",), needs="moe_router_enable_expert_bias"),
        },
    },
    split={
        rf"(.*\.{_EXPERTS})\.gate_up_proj": r"\1.{index}.gate_up_proj.weight",
        rf"(.*\.{_EXPERTS})\.down_proj": r"\1.{index}.w2.weight",
    },
    joined=(
        Joined(
            rf"(.*\.{_EXPERTS}\.\d+)\.w[13]\.weight",
            r"\1.gate_up_proj.weight",
            (r"\1.w1.weight", r"\1.w3.weight"),
        ),
    ),
)


def _pattern(fields: Fields) -> str:
    count, dense = layer_count(fields), fields["num_dense_layers"]
    if type(dense) is not int or not 0 <= dense <= count:
        raise ConfigError(f"config.json: num_dense_layers = {dense!r} is not supported; it must be 0 to {count}")
    require_field(fields, "layer_types")
    mixers = listed_letters(fields, "layer_types", _LETTERS)
    check_count(count, mixers, "layer_types")
    return "".join(mixer + ("-" if index < dense else "E") for index, mixer in enumerate(mixers))


def _experts(fields: Fields) -> Fields:
    check_normalization(flag(fields, "norm_topk_prob", default=True), size(fields, "num_experts_per_tok"))
    return {
        **routed_experts(fields, "num_experts"),
        "moe_ffn_hidden_size": size(fields, "moe_intermediate_size"),
        "moe_router_score_function": "sigmoid",
        "moe_router_topk_scaling_factor": positive_number(fields, "routed_scaling_factor", default=1.0),
        "moe_router_enable_expert_bias": flag(fields, "use_expert_bias", default=True),
    }


LFM2_MOE = replace(
    LFM2,
    model_type="lfm2_moe",
    architecture="Lfm2MoeForCausalLM",
    fields=_FIELDS,
    pattern=_pattern,
    tensors=_TENSORS,
    derived=heads_and_positions,
    experts=_experts,
)
