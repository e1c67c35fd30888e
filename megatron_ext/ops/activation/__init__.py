"""MLP activations, between the two matrix products."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from megatron_ext.ops import triton
from megatron_ext.ops.backends import Operator

ACTIVATION = Operator("activation", triton.backend(__name__))


@ACTIVATION
def squared_relu_(x: Tensor) -> Tensor:
    """Compute relu(x)^2 in place on x [..., f]. Not differentiable."""
    return x.relu_().square_()


@ACTIVATION
def gated_silu(inner: Tensor, factor: float = 1.0) -> Tensor:
    """Return SiLU(factor * gate) * up, [..., f], for [..., 2 f] with the gates first. Not differentiable."""
    gate, up = inner.chunk(2, dim=-1)
    return F.silu(gate if factor == 1.0 else gate * factor).mul_(up)
