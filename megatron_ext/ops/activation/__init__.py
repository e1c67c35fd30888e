"""MLP activations, between the two matrix products."""

from __future__ import annotations

from torch import Tensor

from megatron_ext.ops.activation import reference, triton
from megatron_ext.ops.backends import Backends

ACTIVATION = Backends("activation", triton.BACKEND, reference.BACKEND)


def squared_relu_(x: Tensor) -> Tensor:
    """Compute relu(x)^2 in place on x [..., f]. Not differentiable."""
    return ACTIVATION.compute(x, lambda backend: backend.squared_relu(x))


def gated_silu(inner: Tensor, factor: float = 1.0) -> Tensor:
    """Return SiLU(factor * gate) * up, [..., f], for [..., 2 f] with the gates first. Not differentiable."""
    return ACTIVATION.compute(inner, lambda backend: backend.gated_silu(inner, factor))


__all__ = ["ACTIVATION", "gated_silu", "squared_relu_"]
