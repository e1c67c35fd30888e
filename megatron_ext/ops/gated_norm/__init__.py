"""Gates after a recurrence: y * SiLU(z), alone or with an RMS norm over groups of channels; and such norms alone."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from megatron_ext.ops.backends import Backends
from megatron_ext.ops.gated_norm import cpp, reference, triton
from megatron_ext.ops.gated_norm.reference import NamedNorm, Order, RowNorm

GATED_NORM = Backends("gated_norm", cpp.BACKEND, triton.BACKEND, reference.BACKEND)


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
    return GATED_NORM.choose(y).norm(y, gate, weight, group_size=group_size, eps=eps)


def silu_gate(y: Tensor, gate: Tensor) -> Tensor:
    """Return y * SiLU(gate), computed in fp32: [T, Cn] each, in the gate's type. Differentiable."""
    return GATED_NORM.choose(y).gate(y, gate)


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
    backend = GATED_NORM.choose(y)
    if norm is not None and backend.norm_rows is not None:
        found = backend.norm_rows(y, gate, norm, group_size=group_size, order=Order.NORM_FIRST)
        if found is not None:
            return found
    return backend.gate(plain(y), gate)


def rms_norm(x: Tensor, norm: RowNorm, plain: Callable[[Tensor], Tensor]) -> Tensor:
    """RMS norm over the last axis, in fp32, for norms that torch has no kernel for: [..., Cn] -> [..., Cn].

    `plain` computes the norm for backends without it.
    """
    backend = GATED_NORM.choose(x)
    if backend.norm_rows is not None:
        rows = x.flatten(0, -2)
        found = backend.norm_rows(rows, None, norm, group_size=x.shape[-1], order=Order.NO_GATE)
        if found is not None:
            return found.view(x.shape)
    return plain(x)


def add_and_norm(output: Tensor, residual: Tensor, norm: object, factor: float) -> tuple[Tensor, Tensor] | None:
    """Return residual + factor * output and its norm from one kernel; None if they must be computed separately.

    Args:
        output: [..., Cn].
        residual: [..., Cn].
        norm: Module; only a `NamedNorm` can be fused.
        factor: Factor of the output.
    """
    backend = GATED_NORM.choose(output)
    if backend.add_norm is None or not isinstance(norm, NamedNorm):
        return None
    return backend.add_norm(output, residual, norm.row_norm, factor)


__all__ = [
    "GATED_NORM",
    "NamedNorm",
    "RowNorm",
    "add_and_norm",
    "gated_norm",
    "norm_then_gate",
    "rms_norm",
    "silu_gate",
]
