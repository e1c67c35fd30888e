"""Mistral checkpoints of Hugging Face: Llama's layers, with a window in all of them or in none.

The window defaults to 4096 tokens if the field is absent, as in transformers; "null" disables it.
"""

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
from megatron_ext.models.huggingface.windows import WINDOW, mixers_alike, window_of


def _derived(fields: Fields) -> Fields:
    return {**decoder_attention(fields), **window_of(fields, mixers_alike(fields))}


MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    fields=replace(
        DECODER_FIELDS,
        read=DECODER_FIELDS.read | {WINDOW},
        defaults={"num_key_value_heads": 8, WINDOW: 4096},
    ),
    pattern=decoder_pattern(mixers_alike),
    tensors=TensorTable(with_attention(ATTENTION_TENSORS, {"-": MLP_TENSORS}), letters_per_layer=LETTERS_PER_LAYER),
    constants={"swiglu": True},
    derived=_derived,
)
