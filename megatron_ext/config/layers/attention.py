"""Fields of attention layers."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.config.checks import require
from megatron_ext.config.layers.stack import StackFields


@dataclass(frozen=True)
class AttentionFields(StackFields):
    """Fields of attention layers."""

    num_attention_heads: int = 4
    group_query_attention: bool = False
    num_query_groups: int | None = None  # default: num_attention_heads, or 1 with group_query_attention
    kv_channels: int | None = None  # default: hidden_size // num_attention_heads
    qk_layernorm: bool = False  # over each head, before rotation
    qk_layernorm_over_heads: bool = False  # over the channels of all heads together instead
    attention_output_gate: bool = False  # a sigmoid of the layer's input, on each channel
    add_qkv_bias: bool = False  # for queries, keys and values, if other linear layers have no bias
    add_attention_output_bias: bool = False  # the same for the output projection; needs add_qkv_bias
    attention_window: int | None = None  # of layers W: tokens that a query sees, including its own

    @property
    def query_groups(self) -> int:
        """Number of key/value heads."""
        return self.num_query_groups or (1 if self.group_query_attention else self.num_attention_heads)

    @property
    def head_channels(self) -> int:
        """Size of one attention head (D of query, key and value)."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads


def check_attention(config: AttentionFields) -> None:
    """Require heads that divide the width, and query groups that divide the heads."""
    require(
        config.kv_channels is not None or config.hidden_size % config.num_attention_heads == 0,
        f"hidden size {config.hidden_size} is not a multiple of {config.num_attention_heads} attention heads; "
        "change one of them or give --kv-channels",
    )
    require(
        config.num_attention_heads % config.query_groups == 0,
        f"{config.num_attention_heads} attention heads cannot be shared by {config.query_groups} query groups; "
        "the groups must divide the heads",
    )
    require(
        not config.qk_layernorm_over_heads
        or (config.qk_layernorm and config.normalization == "RMSNorm" and not config.apply_layernorm_1p),
        "qk_layernorm_over_heads needs --qk-layernorm and plain RMSNorm",
    )
    require(
        config.add_qkv_bias or not config.add_attention_output_bias,
        "add_attention_output_bias is for attention with biases of queries, keys and values; set add_qkv_bias too",
    )


def check_window(config: AttentionFields, pattern: str) -> None:
    """Require a window if and only if the pattern has windowed layers (W)."""
    has_layers, window = "W" in pattern, config.attention_window
    require(
        window is not None or not has_layers, f"pattern {pattern!r} has attention in a window (W): set attention_window"
    )
    require(
        window is None or has_layers, f"attention_window {window} is for layers W, and pattern {pattern!r} has none"
    )
