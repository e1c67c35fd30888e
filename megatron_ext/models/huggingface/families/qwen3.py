"""Qwen3 checkpoints of Hugging Face: queries and keys have per-head norms."""

from __future__ import annotations

from dataclasses import replace

from megatron_ext.models.huggingface.attention import attention_biases
from megatron_ext.models.huggingface.blocks import query_and_key_norms
from megatron_ext.models.huggingface.decoder import (
    ATTENTION_TENSORS,
    DECODER_FIELDS,
    LETTERS_PER_LAYER,
    MLP_TENSORS,
    decoder_attention,
    decoder_pattern,
    with_attention,
)
from megatron_ext.models.huggingface.family import Family
from megatron_ext.models.huggingface.fields import Fields
from megatron_ext.models.huggingface.tensors import TensorTable
from megatron_ext.models.huggingface.windows import LISTED_FIELDS, mixers_listed, window_of


def _derived(fields: Fields) -> Fields:
    return {**decoder_attention(fields), **attention_biases(fields), **window_of(fields, mixers_listed(fields))}


QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    fields=replace(
        DECODER_FIELDS,
        read=DECODER_FIELDS.read | LISTED_FIELDS | {"attention_bias"},
        defaults={"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096},
    ),
    pattern=decoder_pattern(mixers_listed),
    tensors=TensorTable(
        with_attention({**ATTENTION_TENSORS, **query_and_key_norms("self_attn")}, {"-": MLP_TENSORS}),
        letters_per_layer=LETTERS_PER_LAYER,
    ),
    constants={"swiglu": True, "qk_layernorm": True},
    derived=_derived,
)
