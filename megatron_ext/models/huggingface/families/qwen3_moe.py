"""Qwen3-MoE checkpoints of Hugging Face: Qwen3 with experts instead of MLPs, in all layers or in some."""

from __future__ import annotations

from dataclasses import replace

from megatron_ext.models.huggingface.attention import attention_biases
from megatron_ext.models.huggingface.blocks import ROUTED_EXPERT, gated_mlp, query_and_key_norms, weights
from megatron_ext.models.huggingface.decoder import (
    ATTENTION_TENSORS,
    DECODER_FIELDS,
    FEED_FORWARD_NORM,
    LETTERS_PER_LAYER,
    MLP_TENSORS,
    decoder_attention,
    decoder_pattern,
    with_attention,
)
from megatron_ext.models.huggingface.expert_routing import SPARSE_FIELDS, softmax_experts, sparse_letters
from megatron_ext.models.huggingface.family import Family
from megatron_ext.models.huggingface.fields import Fields, flag, names, size
from megatron_ext.models.huggingface.tensors import EXPERT, TensorTable
from megatron_ext.models.huggingface.windows import SWITCHED_FIELDS, mixers_if_switched, window_of

_FIELDS = replace(
    DECODER_FIELDS,
    other_names={"num_local_experts": "num_experts"},
    fixed={**DECODER_FIELDS.fixed, "use_qk_norm": (True,)},
    read=DECODER_FIELDS.read
    | SPARSE_FIELDS
    | SWITCHED_FIELDS
    | names("attention_bias num_experts num_experts_per_tok moe_intermediate_size norm_topk_prob"),
    defaults={"num_key_value_heads": 4, "sliding_window": 4096},
)


def _window(fields: Fields) -> Fields:
    return window_of(fields, mixers_if_switched(fields))


def _derived(fields: Fields) -> Fields:
    return {**decoder_attention(fields), **attention_biases(fields), **_window(fields)}


def _experts(fields: Fields) -> Fields:
    return {
        **softmax_experts(fields, "num_experts", is_normalized=flag(fields, "norm_topk_prob", default=False)),
        "moe_ffn_hidden_size": size(fields, "moe_intermediate_size"),
    }


_EXPERT_TENSORS = {
    **FEED_FORWARD_NORM,
    **weights({"mlp.router": "mlp.gate"}),
    **gated_mlp(ROUTED_EXPERT, f"mlp.experts.{EXPERT}"),
}

QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    fields=_FIELDS,
    pattern=decoder_pattern(mixers_if_switched, sparse_letters),
    tensors=TensorTable(
        with_attention(
            {**ATTENTION_TENSORS, **query_and_key_norms("self_attn")}, {"-": MLP_TENSORS, "E": _EXPERT_TENSORS}
        ),
        letters_per_layer=LETTERS_PER_LAYER,
    ),
    constants={"swiglu": True, "qk_layernorm": True},
    derived=_derived,
    experts=_experts,
)
