"""Per-token parameters of recurrences, computed from the projection: step sizes, rates, decays and strengths."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from megatron_ext.ops import triton
from megatron_ext.ops.backends import Operator

STEP_SIZE = Operator("step_size", triton.backend(__name__))


@STEP_SIZE
def step_sizes(dt: Tensor, bias: Tensor, A_log: Tensor) -> tuple[Tensor, Tensor]:
    """Return step sizes and rates of Mamba, in fp32: softplus(dt + bias) and -exp(A_log). Differentiable.

    Args:
        dt: [T, H], from the projection; H heads, or channels.
        bias: [H].
        A_log: [H] or [H, N].

    Returns:
        dt [T, H] and A, of A_log's shape.
    """
    return F.softplus(dt.float() + bias.float()), -A_log.float().exp()


@STEP_SIZE
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
    log_decays = -A_log.float().exp() * F.softplus(alpha.float() + bias.float())
    strength = beta.float().sigmoid()
    if max_strength != 1.0:
        strength = strength * max_strength
    return log_decays, strength
