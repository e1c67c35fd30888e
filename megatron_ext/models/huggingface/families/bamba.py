"""Bamba checkpoints of Hugging Face.

A decoder layer of theirs is two letters of the pattern, a Mamba-2 mixer or attention and then an MLP ("M-", "*-"), each
with its norm and its residual. transformers rotates half of each head, unless the rotary parameters set another share;
`attn_rotary_emb` of published files is the same number in channels.
"""

from __future__ import annotations

from megatron_ext.errors import ConfigError
from megatron_ext.models.huggingface.attention import attention_heads, rotated_head_size
from megatron_ext.models.huggingface.blocks import (
    ATTENTION_NORM,
    MLP,
    MLP_NORM,
    RECURRENT_NORM,
    attention,
    gated_mlp,
    mamba2_mixer,
    weights,
)
from megatron_ext.models.huggingface.family import Family
from megatron_ext.models.huggingface.field_table import DECODER_SIZES, SILU, FieldTable
from megatron_ext.models.huggingface.fields import Fields, layer_count, names
from megatron_ext.models.huggingface.layer_letters import listed_indices
from megatron_ext.models.huggingface.mamba2 import (
    MAMBA2_DEFAULTS,
    MAMBA2_FIXED,
    MAMBA2_READ,
    MAMBA2_SIZES,
    mamba2_heads,
)
from megatron_ext.models.huggingface.rotary_fields import ROPE_FIELDS, SHARE, rotary_fields
from megatron_ext.models.huggingface.tensors import TensorTable

_DEFAULT_ROTARY_SHARE = 0.5

_FIELDS = FieldTable(
    sizes={**DECODER_SIZES, **MAMBA2_SIZES},
    numbers={"rms_norm_eps": ("norm_epsilon", 1e-5)},
    fixed={
        **MAMBA2_FIXED,
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "hidden_act": SILU,
        "sliding_window": (None,),
        SHARE: (_DEFAULT_ROTARY_SHARE, None),  # transformers ignores another share outside of the rotary parameters
    },
    read=names("num_key_value_heads head_dim attn_layer_indices attn_rotary_emb") | ROPE_FIELDS | MAMBA2_READ,
    defaults={**MAMBA2_DEFAULTS, "max_position_embeddings": 262144, "num_key_value_heads": 8},
)

_MIXER_NORM, _FEED_FORWARD_NORM = "input_layernorm", "pre_ff_layernorm"
_TENSORS = TensorTable(
    layers={
        "M": {**weights({RECURRENT_NORM: _MIXER_NORM}), **mamba2_mixer("mamba")},
        "*": {**weights({ATTENTION_NORM: _MIXER_NORM}), **attention("self_attn")},
        "-": {**weights({MLP_NORM: _FEED_FORWARD_NORM}), **gated_mlp(MLP, "feed_forward")},
    },
    letters_per_layer=2,
    final_norm="final_layernorm.weight",
)


def _pattern(fields: Fields) -> str:
    attending = listed_indices(fields, "attn_layer_indices", layer_count(fields))
    return "".join("*-" if index in attending else "M-" for index in range(layer_count(fields)))


def _derived(fields: Fields) -> Fields:
    head = rotated_head_size(fields)
    rotary = rotary_fields(fields, default_share=_DEFAULT_ROTARY_SHARE)
    rotated, share, channels = fields.get("attn_rotary_emb"), rotary["rotary_percent"], head["kv_channels"]
    assert isinstance(share, float), share
    assert isinstance(channels, int), channels
    if rotated is not None and rotated != int(channels * share):
        raise ConfigError(
            f"config.json: attn_rotary_emb = {rotated!r} contradicts {SHARE} = {share} of heads of {channels} channels"
        )
    return {**attention_heads(fields), **head, **rotary, **mamba2_heads(fields)}


BAMBA = Family(
    model_type="bamba",
    architecture="BambaForCausalLM",
    fields=_FIELDS,
    pattern=_pattern,
    tensors=_TENSORS,
    constants={"swiglu": True},
    derived=_derived,
)
