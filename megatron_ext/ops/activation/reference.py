"""Activations of MLPs in plain torch, on any device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from megatron_ext.ops.backends import anything


@dataclass(frozen=True)
class ActivationBackend:
    """One way to compute them; the signatures are those of the package.

    Attributes:
        name: Unique among the operator's backends.
        takes: Whether it computes for an input like that.
        squared_relu: As `squared_relu_`.
        gated_silu: As `gated_silu`.
    """

    name: str
    takes: Callable[[Tensor], bool]
    squared_relu: Callable[[Tensor], Tensor]
    gated_silu: Callable[[Tensor, float], Tensor]


def squared_relu(x: Tensor) -> Tensor:
    """See the package."""
    return x.relu_().square_()


def gated_silu(inner: Tensor, factor: float) -> Tensor:
    """See the package."""
    gate, up = inner.chunk(2, dim=-1)
    return F.silu(gate if factor == 1.0 else gate * factor).mul_(up)


BACKEND = ActivationBackend("reference", anything, squared_relu, gated_silu)
