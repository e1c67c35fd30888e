"""The stack of layers, without Transformer Engine."""

from __future__ import annotations

import torch
from megatron.core.ssm.mamba_block import MambaStack
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.torch_norm import WrappedTorchNorm


class LayerNormFromConfig:
    """A torch norm with the configuration's epsilon and type, wherever it stands.

    Upstream's `MambaLayer` builds its norm without an epsilon and so with 1e-5, whatever the configuration says, and
    upstream's wrapper makes fp32 weights in a model of any type.
    """

    def __new__(
        cls, config: TransformerConfig, hidden_size: int, eps: float | None = None, **_: object
    ) -> torch.nn.Module:
        """The norm itself, as upstream's wrapper class does."""
        norm = WrappedTorchNorm(config, hidden_size, eps=config.layernorm_epsilon)
        return norm.to(config.params_dtype)


class HybridStack(MambaStack):
    """`MambaStack` whose final norm is torch's; upstream hard-codes Transformer Engine's."""

    def __init__(
        self, config: TransformerConfig, *args: object, post_layer_norm: bool = True, **kwargs: object
    ) -> None:
        super().__init__(config, *args, post_layer_norm=False, **kwargs)
        self.post_layer_norm = post_layer_norm
        if self.post_process and post_layer_norm:
            self.final_norm = LayerNormFromConfig(config, config.hidden_size)
