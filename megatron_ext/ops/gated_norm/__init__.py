"""Gates behind a recurrence: y * SiLU(z), alone or with an RMS norm over groups of channels behind it."""

from __future__ import annotations

from torch import Tensor

from megatron_ext.ops.backends import Backends
from megatron_ext.ops.gated_norm import cpp, reference

GATED_NORM = Backends("gated_norm", cpp.BACKEND, reference.BACKEND)


def gated_norm(y: Tensor, gate: Tensor, weight: Tensor, *, group_size: int, eps: float) -> Tensor:
    """RMS norm of y * SiLU(gate) (gate before norm), computed in fp32. Differentiable.

    Args:
        y: [T, Cn].
        gate: [T, Cn].
        weight: [Cn].
        group_size: Channels that are normed together.
        eps: Added to their mean square.

    Returns:
        [T, Cn] in the gate's type.
    """
    return GATED_NORM.choose(y).norm(y, gate, weight, group_size=group_size, eps=eps)


def silu_gate(y: Tensor, gate: Tensor) -> Tensor:
    """Y * SiLU(gate), computed in fp32: [T, Cn] each, in the gate's type. Differentiable."""
    return GATED_NORM.choose(y).gate(y, gate)


__all__ = ["GATED_NORM", "gated_norm", "silu_gate"]
