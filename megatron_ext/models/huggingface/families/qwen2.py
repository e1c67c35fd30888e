"""Qwen2 and Qwen2.5 checkpoints of Hugging Face: queries, keys and values have biases."""

from __future__ import annotations

from dataclasses import replace

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
    return {**decoder_attention(fields), **window_of(fields, mixers_listed(fields))}


QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    fields=replace(
        DECODER_FIELDS,
        fixed={**DECODER_FIELDS.fixed, "dual_chunk_attention_config": (None,)},
        read=DECODER_FIELDS.read | LISTED_FIELDS,
        defaults={"num_key_value_heads": 32, "sliding_window": 4096},
    ),
    pattern=decoder_pattern(mixers_listed),
    tensors=TensorTable(with_attention(ATTENTION_TENSORS, {"-": MLP_TENSORS}), letters_per_layer=LETTERS_PER_LAYER),
    constants={"swiglu": True, "add_qkv_bias": True},
    derived=_derived,
)
