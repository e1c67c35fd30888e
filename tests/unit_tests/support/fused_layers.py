"""Stand-ins of Transformer Engine's layers: norms fused into linear layers, all experts in one module."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from torch import Tensor, nn

_MODULE = "megatron.core.extensions.transformer_engine"  # an engine knows upstream's classes by their names


class TEDotProductAttention(DotProductAttention):
    """Attention."""


class TERowParallelLinear(RowParallelLinear):
    """Linear layer with the scales of 8-bit training."""

    def get_extra_state(self) -> Tensor:
        return torch.zeros(0, dtype=torch.uint8)


class TELayerNormColumnParallelLinear(ColumnParallelLinear):
    """Norm and linear layer in one module."""

    def __init__(self, inputs: int, outputs: int, *, config: TransformerConfig, **options: Any) -> None:
        super().__init__(inputs, outputs, config=config, **options)
        self.eps, self.normalization = config.layernorm_epsilon, config.normalization
        self.layer_norm_weight = nn.Parameter(torch.ones(inputs, dtype=config.params_dtype))
        if self.normalization == "LayerNorm":
            self.layer_norm_bias = nn.Parameter(torch.zeros(inputs, dtype=config.params_dtype))

    def forward(self, hidden: Tensor, *args: Any, **options: Any) -> Any:
        shape = self.layer_norm_weight.shape
        if self.normalization == "LayerNorm":
            return super().forward(F.layer_norm(hidden, shape, self.layer_norm_weight, self.layer_norm_bias, self.eps))
        return super().forward(F.rms_norm(hidden, shape, self.layer_norm_weight, self.eps), *args, **options)

    def get_extra_state(self) -> Tensor:
        return torch.zeros(0, dtype=torch.uint8)


class TEColumnParallelGroupedLinear(nn.Module):
    """Linear layers of all experts of this rank: `weight0`, `weight1` and so on."""

    def __init__(self, count: int, inputs: int, outputs: int) -> None:
        super().__init__()
        for expert in range(count):
            self.register_parameter(f"weight{expert}", nn.Parameter(torch.empty(outputs, inputs)))


class TERowParallelGroupedLinear(TEColumnParallelGroupedLinear):
    """Linear layers of all experts of this rank, back to the hidden size."""


class TEGroupedMLP(nn.Module):
    """Experts of this rank in two modules, with SiLU and a gate."""

    def __init__(
        self, num_local_experts: int, config: TransformerConfig, submodules: Any = None, *_: Any, **__: Any
    ) -> None:
        super().__init__()
        inner = config.moe_ffn_hidden_size
        self.linear_fc1 = TEColumnParallelGroupedLinear(num_local_experts, config.hidden_size, 2 * inner)
        self.linear_fc2 = TERowParallelGroupedLinear(num_local_experts, inner, config.hidden_size)

    def forward(self, hidden: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        counts = tokens_per_expert.tolist()
        parts = []
        for expert, (tokens, weights) in enumerate(zip(hidden.split(counts), probs.split(counts), strict=True)):
            gate, up = F.linear(tokens, getattr(self.linear_fc1, f"weight{expert}")).chunk(2, -1)
            inner = F.silu(gate) * up * weights[:, None]
            parts.append(F.linear(inner, getattr(self.linear_fc2, f"weight{expert}")))
        return torch.cat(parts), None


for _stand_in in (
    TEDotProductAttention,
    TERowParallelLinear,
    TELayerNormColumnParallelLinear,
    TEColumnParallelGroupedLinear,
    TERowParallelGroupedLinear,
):
    _stand_in.__module__ = _MODULE
TEGroupedMLP.__module__ = "megatron.core.transformer.moe.experts"
