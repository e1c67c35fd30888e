"""Mixtral checkpoints of Hugging Face: Mistral's attention, and experts in every layer.

An expert is three matrices, w1 (gate), w3 (up) and w2 (down). Weights of the chosen experts are divided by their sum.
`router_jitter_noise` and `router_aux_loss_coef` are for training.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_ext.models.huggingface.blocks import ROUTED_EXPERT, weights
from megatron_ext.models.huggingface.decoder import (
    ATTENTION_TENSORS,
    DECODER_FIELDS,
    FEED_FORWARD_NORM,
    LETTERS_PER_LAYER,
    decoder_attention,
    decoder_pattern,
    with_attention,
)
from megatron_ext.models.huggingface.expert_routing import local_experts
from megatron_ext.models.huggingface.family import Family
from megatron_ext.models.huggingface.fields import Fields, layer_count, names
from megatron_ext.models.huggingface.tensors import EXPERT, Source, TensorTable
from megatron_ext.models.huggingface.windows import WINDOW, mixers_alike, window_of

_DEFAULT_BASE = 1_000_000

_FIELDS = replace(
    DECODER_FIELDS,
    other_names={"num_experts": "num_local_experts"},
    numbers={"rms_norm_eps": ("norm_epsilon", 1e-5)},
    read=DECODER_FIELDS.read | {WINDOW} | names("num_local_experts num_experts_per_tok"),
    defaults={"num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
)

_EXPERT = f"block_sparse_moe.experts.{EXPERT}"
_EXPERT_TENSORS = {
    **FEED_FORWARD_NORM,
    **weights({"mlp.router": "block_sparse_moe.gate", f"{ROUTED_EXPERT}.linear_fc2": f"{_EXPERT}.w2"}),
    f"{ROUTED_EXPERT}.linear_fc1.weight": Source((f"{_EXPERT}.w1.weight", f"{_EXPERT}.w3.weight")),
}


def _derived(fields: Fields) -> Fields:
    return {**decoder_attention(fields, default_base=_DEFAULT_BASE), **window_of(fields, mixers_alike(fields))}


MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    fields=_FIELDS,
    pattern=decoder_pattern(mixers_alike, lambda fields: "E" * layer_count(fields)),
    tensors=TensorTable(with_attention(ATTENTION_TENSORS, {"E": _EXPERT_TENSORS}), letters_per_layer=LETTERS_PER_LAYER),
    constants={"swiglu": True},
    derived=_derived,
    experts=local_experts,
)
