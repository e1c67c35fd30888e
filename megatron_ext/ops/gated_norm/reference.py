"""Gates and the gated norm in plain torch, on any device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from megatron_ext.ops.backends import anything


@dataclass(frozen=True)
class GateBackend:
    """One way to gate; the signatures are those of the package.

    Attributes:
        name: Unique among the operator's backends.
        takes: Whether it computes for a y like that.
        norm: As `gated_norm`.
        gate: As `silu_gate`.
    """

    name: str
    takes: Callable[[Tensor], bool]
    norm: Callable[..., Tensor]
    gate: Callable[[Tensor, Tensor], Tensor]


def gated_norm(y: Tensor, gate: Tensor, weight: Tensor, *, group_size: int, eps: float) -> Tensor:
    """See the package."""
    gated = y.float() * F.silu(gate.float())
    normed = F.rms_norm(gated.unflatten(-1, (-1, group_size)), (group_size,), eps=eps)
    return (normed.flatten(-2) * weight.float()).to(gate.dtype)


def silu_gate(y: Tensor, gate: Tensor) -> Tensor:
    """See the package."""
    return (y.float() * F.silu(gate.float())).to(gate.dtype)


BACKEND = GateBackend("reference", anything, gated_norm, silu_gate)
