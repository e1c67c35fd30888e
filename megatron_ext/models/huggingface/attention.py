"""Attention heads in a decoded `config.json` of any family."""

from __future__ import annotations

from megatron_ext.errors import ConfigError
from megatron_ext.models.huggingface.fields import Fields, check_divides, flag, size, size_or


def attention_heads(fields: Fields) -> dict[str, object]:
    """Return head fields of `ModelConfig`; a missing or null `num_key_value_heads` means the query heads.

    Raises:
        ConfigError: The key/value heads do not divide the query heads.
    """
    query_heads = size(fields, "num_attention_heads")
    key_value_heads = size_or(fields, "num_key_value_heads", query_heads)
    check_divides({**fields, "num_key_value_heads": key_value_heads}, "num_key_value_heads", "num_attention_heads")
    return {"group_query_attention": key_value_heads != query_heads, "num_query_groups": key_value_heads}


def attention_biases(fields: Fields) -> dict[str, object]:
    """Return the biases of all four projections, as `attention_bias` sets them."""
    has_biases = flag(fields, "attention_bias", default=False)
    return {"add_qkv_bias": has_biases, "add_attention_output_bias": has_biases}


def rotated_head_size(fields: Fields) -> dict[str, object]:
    """Return `kv_channels` of rotated heads: `head_dim`, or an equal share of the hidden size.

    Raises:
        ConfigError: The share is not a whole number, or the channels are odd.
    """
    if fields.get("head_dim") is None:
        check_divides(fields, "num_attention_heads", "hidden_size")
    channels = size_or(fields, "head_dim", size(fields, "hidden_size") // size(fields, "num_attention_heads"))
    if channels % 2:
        raise ConfigError(f"config.json: head_dim = {channels} is not supported; rotary embeddings need an even number")
    return {"kv_channels": channels}
