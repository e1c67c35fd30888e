"""Attention and MLPs whose norm stands behind them, on what they add, and none in front."""

from __future__ import annotations

from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_ext.mcore.attention import PagedSelfAttention
from megatron_ext.mcore.mlp import PlainMLP
from megatron_ext.mcore.norms import LayerNormFromConfig


class OutputNorm(MegatronModule):
    """A norm that can be a part of an MLP: upstream's asks each of its parts for its sharded state."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.norm = LayerNormFromConfig(config, config.hidden_size)

    def forward(self, output: Tensor, bias: Tensor | None) -> tuple[Tensor, None]:
        """[s, b, h] and a bias, as layers give them -> the same, and no bias."""
        return self.norm(output if bias is None else output + bias), None


class NormedSelfAttention(PagedSelfAttention):
    """`PagedSelfAttention`, and a norm."""

    def __init__(self, config: TransformerConfig, *args: object, **options: object) -> None:
        super().__init__(config, *args, **options)
        self.output_norm = OutputNorm(config)

    def forward(self, *args: object, **options: object) -> tuple[Tensor, None]:
        """As upstream; no bias is left."""
        return self.output_norm(*super().forward(*args, **options))


class NormedMLP(PlainMLP):
    """`PlainMLP`, and a norm."""

    def __init__(self, config: TransformerConfig, **options: object) -> None:
        super().__init__(config, **options)
        self.output_norm = OutputNorm(config)

    def forward(self, *args: object, **options: object) -> tuple[Tensor, None]:
        """As upstream; no bias is left."""
        return self.output_norm(*super().forward(*args, **options))
