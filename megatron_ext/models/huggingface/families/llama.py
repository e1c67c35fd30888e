"""Llama checkpoints of Hugging Face.

A decoder layer of theirs is two letters of the pattern, attention and MLP ("*-"), each with its norm and its residual.
Rotary embeddings rotate the two halves of a head against each other on both sides, so query and key are copied as they
are.
"""

from __future__ import annotations

from megatron_ext.models.huggingface.attention import attention_heads, rotated_head_size
from megatron_ext.models.huggingface.blocks import ATTENTION_NORM, MLP, MLP_NORM, attention, gated_mlp, weights
from megatron_ext.models.huggingface.family import Family
from megatron_ext.models.huggingface.field_table import DECODER_SIZES, SILU, FieldTable
from megatron_ext.models.huggingface.fields import Fields, layer_count, names
from megatron_ext.models.huggingface.rotary import ROPE_FIELDS, SHARE, rotary_fields
from megatron_ext.models.huggingface.tensors import TensorTable

_LAYER = "*-"

_FIELDS = FieldTable(
    sizes=DECODER_SIZES,
    numbers={"rms_norm_eps": ("norm_epsilon", 1e-6)},
    fixed={
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "hidden_act": SILU,
        "pretraining_tp": (1, None),
        "sliding_window": (None,),
        SHARE: (1.0, None),
    },
    read=names("num_key_value_heads head_dim") | ROPE_FIELDS,
)

_TENSORS = TensorTable(
    layers={
        "*": {**weights({ATTENTION_NORM: "input_layernorm"}), **attention("self_attn")},
        "-": {**weights({MLP_NORM: "post_attention_layernorm"}), **gated_mlp(MLP, "mlp")},
    },
    letters_per_layer=len(_LAYER),
    ignored=r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq",  # of older files; it follows from the configuration
)


def _derived(fields: Fields) -> Fields:
    return {**attention_heads(fields), **rotated_head_size(fields), **rotary_fields(fields)}


LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    fields=_FIELDS,
    pattern=lambda fields: _LAYER * layer_count(fields),
    tensors=_TENSORS,
    constants={"swiglu": True},
    derived=_derived,
)
