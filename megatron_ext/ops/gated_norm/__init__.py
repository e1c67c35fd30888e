"""Gates after a recurrence: y * SiLU(z), alone or with an RMS norm over groups of channels; and such norms alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import torch.nn.functional as F
from torch import Tensor

from megatron_ext.ops import cpp, triton
from megatron_ext.ops.backends import FunctionBackend, Operator


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


def _in_cpp(name: str) -> Callable[..., Tensor] | None:
    return getattr(cpp.kernels(), name) if name in ("gated_norm", "silu_gate") else None


GATED_NORM = Operator("gated_norm", FunctionBackend(cpp.NAME, cpp.takes, _in_cpp), triton.backend(__name__))


@GATED_NORM
def gated_norm(y: Tensor, gate: Tensor, weight: Tensor, *, group_size: int, eps: float) -> Tensor:
    """RMS norm of y * SiLU(gate) (gate before norm), computed in fp32. Differentiable.

    Args:
        y: [T, Cn].
        gate: [T, Cn].
        weight: [Cn].
        group_size: Channels that are normalized together.
        eps: Added to the mean square of a group.

    Returns:
        [T, Cn] in the gate's type.
    """
    gated = y.float() * F.silu(gate.float())
    normed = F.rms_norm(gated.unflatten(-1, (-1, group_size)), (group_size,), eps=eps)
    return (normed.flatten(-2) * weight.float()).to(gate.dtype)


@GATED_NORM
def silu_gate(y: Tensor, gate: Tensor) -> Tensor:
    """Return y * SiLU(gate), computed in fp32: [T, Cn] each, in the gate's type. Differentiable."""
    return (y.float() * F.silu(gate.float())).to(gate.dtype)


@GATED_NORM
def norm_then_gate(
    y: Tensor, gate: Tensor, norm: RowNorm | None, plain: Callable[[Tensor], Tensor], *, group_size: int
) -> Tensor:
    """RMS norm of y, times SiLU(gate) (norm before gate).

    Args:
        y: [T, Cn].
        gate: [T, Cn], in the type of the result.
        norm: Parameters of the norm; None if the norm can only be called.
        plain: Computes the norm, [T, Cn] -> [T, Cn] of any type, for backends without it.
        group_size: Channels that are normalized together.
    """
    return silu_gate(plain(y), gate)


@GATED_NORM
def rms_norm(x: Tensor, norm: RowNorm, plain: Callable[[Tensor], Tensor]) -> Tensor:
    """RMS norm over the last axis, in fp32, for norms that torch has no kernel for: [..., Cn] -> [..., Cn].

    `plain` computes the norm for backends without it.
    """
    return plain(x)


@GATED_NORM
def add_and_norm(output: Tensor, residual: Tensor, norm: object, factor: float) -> tuple[Tensor, Tensor] | None:
    """Return residual + factor * output and its norm from one kernel; None if they must be computed separately.

    Args:
        output: [..., Cn].
        residual: [..., Cn].
        norm: Module; only a `NamedNorm` can be fused.
        factor: Factor of the output.
    """
    return None
