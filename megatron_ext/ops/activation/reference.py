"""MLP activations in plain torch, on any device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from megatron_ext.ops.backends import Backend, anything


@dataclass(frozen=True)
class ActivationBackend(Backend):
    """Backend of the MLP activations, with the signatures of the package's functions.

    Attributes:
        squared_relu: See `squared_relu_`.
        gated_silu: See `gated_silu`.
    """

    squared_relu: Callable[[Tensor], Tensor]
    gated_silu: Callable[[Tensor, float], Tensor]


def squared_relu(x: Tensor) -> Tensor:
    return x.relu_().square_()


def gated_silu(inner: Tensor, factor: float) -> Tensor:
    gate, up = inner.chunk(2, dim=-1)
    return F.silu(gate if factor == 1.0 else gate * factor).mul_(up)


BACKEND = ActivationBackend("reference", anything, squared_relu, gated_silu)
