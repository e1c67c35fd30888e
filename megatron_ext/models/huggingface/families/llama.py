"""Llama checkpoints of Hugging Face, with optional biases of attention and MLPs."""

from __future__ import annotations

from dataclasses import replace

from megatron_ext.models.huggingface.attention import attention_biases
from megatron_ext.models.huggingface.blocks import MLP, gated_mlp_biases
from megatron_ext.models.huggingface.decoder import (
    ATTENTION_TENSORS,
    DECODER_FIELDS,
    LETTERS_PER_LAYER,
    MLP_TENSORS,
    decoder_attention,
    decoder_pattern,
)
from megatron_ext.models.huggingface.family import Family
from megatron_ext.models.huggingface.fields import Fields, flag, names
from megatron_ext.models.huggingface.rotary_fields import SHARE
from megatron_ext.models.huggingface.tensors import TensorTable

_FIELDS = replace(
    DECODER_FIELDS,
    fixed={
        **DECODER_FIELDS.fixed,
        "pretraining_tp": (1, None),
        "sliding_window": (None,),
        SHARE: (1.0, None),
    },
    read=DECODER_FIELDS.read | names("attention_bias mlp_bias"),
)

_TENSORS = TensorTable(
    layers={"*": ATTENTION_TENSORS, "-": {**MLP_TENSORS, **gated_mlp_biases(MLP, "mlp")}},
    letters_per_layer=LETTERS_PER_LAYER,
    ignored=r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq",  # in older files; derived from the configuration
)


def _derived(fields: Fields) -> Fields:
    has_mlp_biases = flag(fields, "mlp_bias", default=False)
    return {**decoder_attention(fields), **attention_biases(fields), "add_mlp_bias": has_mlp_biases}


LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    fields=_FIELDS,
    pattern=decoder_pattern(),
    tensors=_TENSORS,
    constants={"swiglu": True},
    derived=_derived,
)
