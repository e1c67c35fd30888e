"""Heads of attention in a decoded `config.json`, whatever the family."""

from __future__ import annotations

from megatron_ext.errors import ConfigError
from megatron_ext.models.huggingface.fields import Fields, check_divides, flag, size, size_or


def attention_heads(fields: Fields) -> dict[str, object]:
    """Fields of `ModelConfig`; as many key/value heads as query heads if `num_key_value_heads` is null or absent.

    Raises:
        ConfigError: Heads that query heads cannot share.
    """
    query_heads = size(fields, "num_attention_heads")
    key_value_heads = size_or(fields, "num_key_value_heads", query_heads)
    check_divides({**fields, "num_key_value_heads": key_value_heads}, "num_key_value_heads", "num_attention_heads")
    return {"group_query_attention": key_value_heads != query_heads, "num_query_groups": key_value_heads}


def attention_biases(fields: Fields) -> dict[str, object]:
    """Biases of all four projections, if `attention_bias` says so."""
    has_biases = flag(fields, "attention_bias", default=False)
    return {"add_qkv_bias": has_biases, "add_attention_output_bias": has_biases}


def rotated_head_size(fields: Fields) -> dict[str, object]:
    """`kv_channels` of heads that are rotated: `head_dim`, or an equal share of the width.

    Raises:
        ConfigError: No whole share, or one that has no halves.
    """
    if fields.get("head_dim") is None:
        check_divides(fields, "num_attention_heads", "hidden_size")
    channels = size_or(fields, "head_dim", size(fields, "hidden_size") // size(fields, "num_attention_heads"))
    if channels % 2:
        raise ConfigError(f"config.json: head_dim = {channels} is not supported; rotary embeddings need an even number")
    return {"kv_channels": channels}
