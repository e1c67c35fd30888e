"""LFM2 checkpoints of Hugging Face.

A decoder layer of theirs is two letters of the pattern, a short convolution or attention and then an MLP ("M-", "*-"),
each with its norm and its residual. Notes:

- The width of the MLP is `intermediate_size` (`block_ff_dim`), or, with `block_auto_adjust_ff_dim`, two thirds of that
  times `block_ffn_dim_multiplier`, rounded up to a multiple of `block_multiple_of`.
- The norm after the last layer is called `embedding_norm`.
- Published files give some sizes several times; they must agree.
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
    copied,
    weights,
)
from megatron_ext.models.huggingface.family import Family
from megatron_ext.models.huggingface.field_table import DECODER_SIZES, FieldTable
from megatron_ext.models.huggingface.fields import Fields, flag, layer_count, names, positive_number, size, size_or
from megatron_ext.models.huggingface.layer_letters import check_count, listed_indices, listed_letters
from megatron_ext.models.huggingface.rotary_fields import ROPE_FIELDS, rotary_fields
from megatron_ext.models.huggingface.tensors import Source, TensorTable

_LETTERS = {"conv": "M", "full_attention": "*"}
_DEFAULT_BASE = 1_000_000

_FIELDS = FieldTable(
    other_names={
        "block_dim": "hidden_size",
        "conv_dim": "hidden_size",
        "conv_dim_out": "hidden_size",
        "block_ff_dim": "intermediate_size",
        "block_norm_eps": "norm_eps",
        "num_heads": "num_attention_heads",
        "theta": "rope_theta",
        "tie_embedding": "tie_word_embeddings",
    },
    sizes={
        **{theirs: ours for theirs, ours in DECODER_SIZES.items() if theirs != "intermediate_size"},
        "conv_L_cache": "short_conv_kernel_dim",
    },
    numbers={"norm_eps": ("norm_epsilon", 1e-5)},
    fixed={"conv_bias": (False,), "block_use_swiglu": (True,), "use_pos_enc": (True,), "sliding_window": (None,)},
    read=names(
        """
        num_key_value_heads head_dim layer_types full_attn_idxs
        intermediate_size block_auto_adjust_ff_dim block_ffn_dim_multiplier block_multiple_of
        """
    )
    | ROPE_FIELDS,
    defaults={
        "hidden_size": 2560,
        "intermediate_size": 12288,
        "max_position_embeddings": 128_000,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 65536,
        "conv_L_cache": 3,
    },
    is_tied=True,
)

_MIXER_NORM, _FEED_FORWARD_NORM = "operator_norm", "ffn_norm"
_TENSORS = TensorTable(
    layers={
        "M": {
            **weights({RECURRENT_NORM: _MIXER_NORM, "mixer.conv1d": "conv.conv"}),
            **copied("mixer", "conv", ("in_proj.weight", "out_proj.weight")),
        },
        "*": {
            **weights({ATTENTION_NORM: _MIXER_NORM}),
            "self_attention.linear_qkv.weight": attention("self_attn")["self_attention.linear_qkv.weight"],
            **weights({"self_attention.linear_proj": "self_attn.out_proj"}),
            **weights({f"self_attention.{one}_layernorm": f"self_attn.{one}_layernorm" for one in "qk"}),
        },
        "-": {
            **weights({MLP_NORM: _FEED_FORWARD_NORM, f"{MLP}.linear_fc2": "feed_forward.w2"}),
            f"{MLP}.linear_fc1.weight": Source(("feed_forward.w1.weight", "feed_forward.w3.weight")),
        },
    },
    letters_per_layer=2,
    final_norm="embedding_norm.weight",
)


def _pattern(fields: Fields) -> str:
    """Return two letters per layer, from the list of layer kinds, the list of attention layers, or both if equal."""
    count = layer_count(fields)
    attending = listed_indices(fields, "full_attn_idxs", count)
    by_index = "".join("*" if index in attending else "M" for index in range(count))
    if fields.get("layer_types") is None:
        mixers = "*" * count if fields.get("full_attn_idxs") is None else by_index
    else:
        mixers = listed_letters(fields, "layer_types", _LETTERS)
        check_count(count, mixers, "layer_types")
        if fields.get("full_attn_idxs") is not None and mixers != by_index:
            raise ConfigError(
                f"config.json: full_attn_idxs = {fields['full_attn_idxs']!r} contradicts layer_types "
                f"{fields['layer_types']!r}"
            )
    return "".join(f"{mixer}-" for mixer in mixers)


def heads_and_positions(fields: Fields) -> dict[str, object]:
    """Return the attention heads and rotary embedding in the fields of `ModelConfig`."""
    return {**attention_heads(fields), **rotated_head_size(fields), **rotary_fields(_with_base(fields))}


def _with_base(fields: Fields) -> Fields:
    """Return the fields with the family's rotary base if the file has none."""
    sources = [fields, *(fields[name] for name in ROPE_FIELDS if isinstance(fields.get(name), dict))]
    has_base = any(isinstance(one, dict) and one.get("rope_theta") is not None for one in sources)
    return fields if has_base else {**fields, "rope_theta": _DEFAULT_BASE}


def _ffn_size(fields: Fields) -> int:
    width = size(fields, "intermediate_size")
    if not flag(fields, "block_auto_adjust_ff_dim", default=True):
        return width
    width, factor = 2 * width // 3, fields.get("block_ffn_dim_multiplier", 1.0)
    if factor is None:
        return width
    multiple = size_or(fields, "block_multiple_of", 256)
    width = int(positive_number(fields, "block_ffn_dim_multiplier", default=1.0) * width)
    return -(-width // multiple) * multiple


LFM2 = Family(
    model_type="lfm2",
    architecture="Lfm2ForCausalLM",
    fields=_FIELDS,
    pattern=_pattern,
    tensors=_TENSORS,
    constants={"recurrent_layer": "short_conv", "swiglu": True, "qk_layernorm": True},
    derived=lambda fields: {**heads_and_positions(fields), "ffn_hidden_size": _ffn_size(fields)},
)
