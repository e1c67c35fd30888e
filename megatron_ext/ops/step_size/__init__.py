"""What recurrences are told about each token, made of its projection: step sizes, rates, decays and strengths."""

from __future__ import annotations

from torch import Tensor

from megatron_ext.ops.backends import Backends
from megatron_ext.ops.step_size import reference, triton

STEP_SIZE = Backends("step_size", triton.BACKEND, reference.BACKEND)


def step_sizes(dt: Tensor, bias: Tensor, A_log: Tensor) -> tuple[Tensor, Tensor]:
    """Step sizes and rates of Mamba's recurrences, in fp32: softplus(dt + bias) and -exp(A_log). Differentiable.

    Args:
        dt: [T, H], what the projection says; H heads, or channels.
        bias: [H].
        A_log: [H] or [H, N].

    Returns:
        dt [T, H] and A, of A_log's shape.
    """
    return STEP_SIZE.choose(dt).sizes(dt, bias, A_log)


def decays(
    beta: Tensor, alpha: Tensor, bias: Tensor, A_log: Tensor, *, max_strength: float = 1.0
) -> tuple[Tensor, Tensor]:
    """What the gated delta rule is told, in fp32, [T, H] each. Differentiable.

    Args:
        beta: [T, H].
        alpha: [T, H].
        bias: [H].
        A_log: [H].
        max_strength: With which a token overwrites what there was.

    Returns:
        Logarithms of the decays, -exp(A_log) * softplus(alpha + bias), and strengths, max_strength * sigmoid(beta).
    """
    return STEP_SIZE.choose(alpha).decays(beta, alpha, bias, A_log, max_strength=max_strength)


__all__ = ["STEP_SIZE", "decays", "step_sizes"]
