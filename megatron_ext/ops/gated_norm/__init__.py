"""Gates after a recurrence: y * SiLU(z), alone or with an RMS norm over groups of channels; and such norms alone."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from megatron_ext.ops import cpp
from megatron_ext.ops.backends import Backends
from megatron_ext.ops.gated_norm import reference, triton
from megatron_ext.ops.gated_norm.reference import GateBackend, NamedNorm, Order, RowNorm


def _gated_norm_in_cpp(y: Tensor, gate: Tensor, weight: Tensor, *, group_size: int, eps: float) -> Tensor:
    return cpp.kernels().gated_norm(y, gate, weight, group_size, eps)


GATED_NORM = Backends(
    "gated_norm",
    GateBackend(cpp.NAME, cpp.takes, _gated_norm_in_cpp, lambda y, gate: cpp.kernels().silu_gate(y, gate)),
    triton.BACKEND,
    reference.BACKEND,
)


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
    return GATED_NORM.compute(y, lambda backend: backend.norm(y, gate, weight, group_size=group_size, eps=eps))


def silu_gate(y: Tensor, gate: Tensor) -> Tensor:
    """Return y * SiLU(gate), computed in fp32: [T, Cn] each, in the gate's type. Differentiable."""
    return GATED_NORM.compute(y, lambda backend: backend.gate(y, gate))


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

    def compute(backend: GateBackend) -> Tensor:
        if norm is None or backend.norm_rows is None:
            return backend.gate(plain(y), gate)
        return backend.norm_rows(y, gate, norm, group_size=group_size, order=Order.NORM_FIRST)

    return GATED_NORM.compute(y, compute)


def rms_norm(x: Tensor, norm: RowNorm, plain: Callable[[Tensor], Tensor]) -> Tensor:
    """RMS norm over the last axis, in fp32, for norms that torch has no kernel for: [..., Cn] -> [..., Cn].

    `plain` computes the norm for backends without it.
    """

    def compute(backend: GateBackend) -> Tensor:
        if backend.norm_rows is None:
            return plain(x)
        rows, size = x.flatten(0, -2), x.shape[-1]
        return backend.norm_rows(rows, None, norm, group_size=size, order=Order.NO_GATE).view(x.shape)

    return GATED_NORM.compute(x, compute)


def add_and_norm(output: Tensor, residual: Tensor, norm: object, factor: float) -> tuple[Tensor, Tensor] | None:
    """Return residual + factor * output and its norm from one kernel; None if they must be computed separately.

    Args:
        output: [..., Cn].
        residual: [..., Cn].
        norm: Module; only a `NamedNorm` can be fused.
        factor: Factor of the output.
    """

    def compute(backend: GateBackend) -> tuple[Tensor, Tensor] | None:
        if backend.add_norm is None or not isinstance(norm, NamedNorm):
            return None
        return backend.add_norm(output, residual, norm.row_norm, factor)

    return GATED_NORM.compute(output, compute)


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
