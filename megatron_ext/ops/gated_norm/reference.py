"""Gates and the gated norm in plain torch, on any device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import torch.nn.functional as F
from torch import Tensor

from megatron_ext.ops.backends import Backend, anything


class Order(IntEnum):
    """Position of a gate relative to a norm."""

    NO_GATE = 0
    GATE_FIRST = 1
    NORM_FIRST = 2


@dataclass(frozen=True)
class RowNorm:
    """Parameters of an RMS norm.

    Attributes:
        weight: Weight of each channel, or of the channels of one group for all groups; None for 1.
        eps: Added to the mean square.
        offset: Added to each weight.
    """

    weight: Tensor | None
    eps: float
    offset: float = 0.0


class NamedNorm:
    """Norm that exposes its parameters, so that a kernel can fuse it with other work."""

    @property
    def row_norm(self) -> RowNorm:
        """Parameters of the norm over each row."""
        raise NotImplementedError


@dataclass(frozen=True)
class GateBackend(Backend):
    """Backend of gates and gated norms, with the signatures of the package's functions.

    Attributes:
        norm: See `gated_norm`.
        gate: See `silu_gate`.
        norm_rows: (x [T, Cn], gate [T, Cn] or None, norm, group_size, order) -> [T, Cn] of the same type, for backends
            that compute any norm in one kernel. Not differentiable.
        add_norm: See `add_and_norm`, for the same backends.
    """

    norm: Callable[..., Tensor]
    gate: Callable[[Tensor, Tensor], Tensor]
    norm_rows: Callable[..., Tensor] | None = None
    add_norm: Callable[[Tensor, Tensor, RowNorm, float], tuple[Tensor, Tensor]] | None = None


def gated_norm(y: Tensor, gate: Tensor, weight: Tensor, *, group_size: int, eps: float) -> Tensor:
    gated = y.float() * F.silu(gate.float())
    normed = F.rms_norm(gated.unflatten(-1, (-1, group_size)), (group_size,), eps=eps)
    return (normed.flatten(-2) * weight.float()).to(gate.dtype)


def silu_gate(y: Tensor, gate: Tensor) -> Tensor:
    return (y.float() * F.silu(gate.float())).to(gate.dtype)


BACKEND = GateBackend("reference", anything, gated_norm, silu_gate)
