"""Attention and MLPs whose norm stands behind them, on what they add, and none in front."""

from __future__ import annotations

from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from megatron_ext.mcore.attention import PagedSelfAttention
from megatron_ext.mcore.mlp import PlainMLP
from megatron_ext.mcore.norms import LayerNormFromConfig


class NormedSelfAttention(PagedSelfAttention):
    """`PagedSelfAttention`, and a norm."""

    def __init__(self, config: TransformerConfig, *args: object, **options: object) -> None:
        super().__init__(config, *args, **options)
        self.output_norm = LayerNormFromConfig(config, config.hidden_size)

    def forward(self, *args: object, **options: object) -> tuple[Tensor, None]:
        """As upstream; no bias is left."""
        return _normed(self.output_norm, *super().forward(*args, **options))


class NormedMLP(PlainMLP):
    """`PlainMLP`, and a norm."""

    def __init__(self, config: TransformerConfig, **options: object) -> None:
        super().__init__(config, **options)
        self.output_norm = LayerNormFromConfig(config, config.hidden_size)

    def forward(self, *args: object, **options: object) -> tuple[Tensor, None]:
        """As upstream; no bias is left."""
        return _normed(self.output_norm, *super().forward(*args, **options))


def _normed(norm: nn.Module, output: Tensor, bias: Tensor | None) -> tuple[Tensor, None]:
    return norm(output if bias is None else output + bias), None
