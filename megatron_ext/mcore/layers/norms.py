"""Norms without Transformer Engine."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch import Tensor

from megatron_ext.mcore.layers.layer_config import LayerConfig
from megatron_ext.ops import gated_norm
from megatron_ext.ops.gated_norm import NamedNorm, RowNorm


class LayerNormFromConfig:
    """Torch norm with the configuration's epsilon and type, in any layer.

    Upstream's `MambaLayer` builds its norm without an epsilon and so with 1e-5, regardless of the configuration, and
    upstream's wrapper makes fp32 weights in a model of any type.
    """

    def __new__(  # type: ignore[misc]  # upstream's specs want a class
        cls, config: TransformerConfig, hidden_size: int, eps: float | None = None, **_: object
    ) -> torch.nn.Module:
        """Return the norm itself, as upstream's wrapper class does."""
        if config.layernorm_zero_centered_gamma:
            return ZeroCenteredRMSNorm(hidden_size, config.layernorm_epsilon, config.params_dtype)
        if config.normalization == "RMSNorm":
            return PlainRMSNorm(hidden_size, eps=config.layernorm_epsilon, dtype=config.params_dtype)
        norm = WrappedTorchNorm(config, hidden_size, eps=config.layernorm_epsilon)
        return norm.to(config.params_dtype)


class PlainRMSNorm(torch.nn.RMSNorm, NamedNorm):
    """`torch.nn.RMSNorm`; at inference in two passes over memory instead of five if torch has no kernel for it."""

    eps: float

    def forward(self, x: Tensor) -> Tensor:
        """Normalize [..., channels] -> [..., channels]."""
        if not torch.is_inference_mode_enabled() or x.dtype is not torch.float32 or x.device.type != "cpu":
            return super().forward(x)
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)  # |x|^2 / channels is the mean square
        return (x * length.square_().mul_(1 / x.shape[-1]).add_(self.eps).rsqrt_()).mul_(self.weight)

    @property
    def row_norm(self) -> RowNorm:
        """Weight and epsilon; see `NamedNorm`."""
        return RowNorm(self.weight, self.eps)


class ZeroCenteredRMSNorm(torch.nn.Module, NamedNorm):
    """RMSNorm that multiplies by 1 + weight, in fp32: 16 bits are more precise for a weight near 0 than near 1.

    Equal to Transformer Engine's norms with `zero_centered_gamma`.
    """

    def __init__(self, channels: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.zeros(channels, dtype=dtype))

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalize [..., channels] -> [..., channels], in the same type."""
        return gated_norm.rms_norm(hidden, self.row_norm, self._normed)

    @property
    def row_norm(self) -> RowNorm:
        """Weight, epsilon and the offset 1 that is added to the weight; see `NamedNorm`."""
        return RowNorm(self.weight, self.eps, offset=1.0)

    def _normed(self, hidden: Tensor) -> Tensor:
        """Normalize in plain torch; differentiable."""
        normed = F.rms_norm(hidden.float(), self.weight.shape, eps=self.eps)
        return torch.addcmul(normed, normed, self.weight.float()).to(hidden.dtype)


class HeadsNorm(PlainRMSNorm):
    """RMSNorm of the channels of all heads together."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalize [..., heads, D] -> [..., heads, D]."""
        return super().forward(x.flatten(-2)).view(x.shape)


class QueryNormFromConfig:
    """Norm of queries as configured: over each head, or over all heads together."""

    heads = "num_attention_heads"

    def __new__(  # type: ignore[misc]  # as above
        cls, config: LayerConfig, hidden_size: int, eps: float | None = None, **_: object
    ) -> torch.nn.Module:
        """Return the norm itself, for heads of `hidden_size` channels."""
        if config.qk_layernorm_over_heads:
            channels = hidden_size * getattr(config, cls.heads)
            return HeadsNorm(channels, eps=config.layernorm_epsilon, dtype=config.params_dtype)
        return LayerNormFromConfig(config, hidden_size)


class KeyNormFromConfig(QueryNormFromConfig):
    """Norm of keys as configured, likewise."""

    heads = "num_query_groups"


class OutputNorm(MegatronModule):
    """Norm that can be a part of an MLP: upstream's MLP asks each of its parts for its sharded state."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.norm = LayerNormFromConfig(config, config.hidden_size)

    def forward(self, output: Tensor, bias: Tensor | None) -> Tensor:
        """Normalize the sum of output [s, b, h] and bias -> [s, b, h]."""
        normed: Tensor = self.norm(output if bias is None else output + bias)
        return normed
