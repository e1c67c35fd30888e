"""Activations of MLPs, between their two products."""

from __future__ import annotations

from torch import Tensor

from megatron_ext.ops.activation import reference, triton
from megatron_ext.ops.backends import Backends

ACTIVATION = Backends("activation", triton.BACKEND, reference.BACKEND)


def squared_relu_(x: Tensor) -> Tensor:
    """relu(x)^2, written over x [..., f]. Not differentiable."""
    return ACTIVATION.choose(x).squared_relu(x)


def gated_silu(inner: Tensor, factor: float = 1.0) -> Tensor:
    """SiLU(factor * gate) * up, of [..., 2 f] with the gates first: [..., f]. Not differentiable."""
    return ACTIVATION.choose(inner).gated_silu(inner, factor)


__all__ = ["ACTIVATION", "gated_silu", "squared_relu_"]
