"""Per-token parameters of recurrences, computed from the projection: step sizes, rates, decays and strengths."""

from __future__ import annotations

from torch import Tensor

from megatron_ext.ops.backends import Backends
from megatron_ext.ops.step_size import reference, triton

STEP_SIZE = Backends("step_size", triton.BACKEND, reference.BACKEND)


def step_sizes(dt: Tensor, bias: Tensor, A_log: Tensor) -> tuple[Tensor, Tensor]:
    """Return step sizes and rates of Mamba, in fp32: softplus(dt + bias) and -exp(A_log). Differentiable.

    Args:
        dt: [T, H], from the projection; H heads, or channels.
        bias: [H].
        A_log: [H] or [H, N].

    Returns:
        dt [T, H] and A, of A_log's shape.
    """
    return STEP_SIZE.compute(dt, lambda backend: backend.sizes(dt, bias, A_log))


def decays(
    beta: Tensor, alpha: Tensor, bias: Tensor, A_log: Tensor, *, max_strength: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return decays and strengths of the gated delta rule, in fp32, [T, H] each. Differentiable.

    Args:
        beta: [T, H].
        alpha: [T, H].
        bias: [H].
        A_log: [H].
        max_strength: Maximum strength with which a token overwrites the state.

    Returns:
        Logarithms of the decays, -exp(A_log) * softplus(alpha + bias), and strengths, max_strength * sigmoid(beta).
    """
    return STEP_SIZE.compute(alpha, lambda backend: backend.decays(beta, alpha, bias, A_log, max_strength=max_strength))


__all__ = ["STEP_SIZE", "decays", "step_sizes"]
