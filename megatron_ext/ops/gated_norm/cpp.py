"""Gates and the gated norm in C++, for CPUs, in one pass each, with the kernels in `kernels.cpp`."""

from __future__ import annotations

from torch import Tensor

from megatron_ext.ops import cpp
from megatron_ext.ops.gated_norm.reference import GateBackend


def gated_norm(y: Tensor, gate: Tensor, weight: Tensor, *, group_size: int, eps: float) -> Tensor:
    return cpp.kernels().gated_norm(y, gate, weight, group_size, eps)


def silu_gate(y: Tensor, gate: Tensor) -> Tensor:
    return cpp.kernels().silu_gate(y, gate)


BACKEND = GateBackend(cpp.NAME, cpp.takes, gated_norm, silu_gate)
