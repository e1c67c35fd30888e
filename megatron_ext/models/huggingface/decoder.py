"""Llama-like decoders: attention with rotary embeddings, then a gated MLP.

A decoder layer of theirs is two letters of the pattern, attention and MLP ("*-") or experts ("*E"), each with its norm
and its residual. Rotary embeddings rotate the two halves of a head against each other on both sides, so query and key
are copied unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from megatron_ext.models.huggingface.attention import attention_heads, rotated_head_size
from megatron_ext.models.huggingface.blocks import ATTENTION_NORM, MLP, MLP_NORM, attention, gated_mlp, weights
from megatron_ext.models.huggingface.field_table import DECODER_SIZES, SILU, FieldTable
from megatron_ext.models.huggingface.fields import Fields, layer_count, names
from megatron_ext.models.huggingface.rotary_fields import DEFAULT_BASE, ROPE_FIELDS, rotary_fields
from megatron_ext.models.huggingface.tensors import LayerTable

LETTERS_PER_LAYER = 2

DECODER_FIELDS = FieldTable(
    sizes=DECODER_SIZES,
    numbers={"rms_norm_eps": ("norm_epsilon", 1e-6)},
    fixed={"hidden_act": SILU},
    read=names("num_key_value_heads head_dim") | ROPE_FIELDS,
)

FEED_FORWARD_NORM = weights({MLP_NORM: "post_attention_layernorm"})
ATTENTION_TENSORS = {**weights({ATTENTION_NORM: "input_layernorm"}), **attention("self_attn")}
MLP_TENSORS = {**FEED_FORWARD_NORM, **gated_mlp(MLP, "mlp")}


Letters = Callable[[Fields], str]  # one letter for each layer of theirs


def with_attention(attention: LayerTable, others: Mapping[str, LayerTable]) -> dict[str, LayerTable]:
    """Return tables by letter; attention has the same tensors with a window and without."""
    return {"*": attention, "W": attention, **others}


def all_attention(fields: Fields) -> str:
    """Return the letters of attention without a window in every layer."""
    return "*" * layer_count(fields)


def all_mlps(fields: Fields) -> str:
    """Return the letters of an MLP in every layer."""
    return "-" * layer_count(fields)


def decoder_pattern(mixers: Letters = all_attention, feed_forwards: Letters = all_mlps) -> Letters:
    """Return a pattern function with two letters for each layer of theirs."""
    return lambda fields: "".join(map("".join, zip(mixers(fields), feed_forwards(fields), strict=True)))


def decoder_attention(fields: Fields, *, default_base: int = DEFAULT_BASE) -> dict[str, object]:
    """Return heads, head size and rotary embedding in the fields of `ModelConfig`.

    Args:
        fields: A decoded `config.json`.
        default_base: Base of the rotary embedding, if the file has none.
    """
    rotation = rotary_fields(fields, default_base=default_base)
    return {**attention_heads(fields), **rotated_head_size(fields), **rotation}
