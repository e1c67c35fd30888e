"""Initial step sizes of Mamba layers: log-uniform, given as biases of the softplus that makes them positive."""

from __future__ import annotations

import math

import torch
from torch import Tensor

DT_INIT_RANGE = (1e-3, 1e-1)
DT_INIT_FLOOR = 1e-4


def random_step_bias(count: int) -> Tensor:
    """Return biases [count] fp32 whose softplus is log-uniform over DT_INIT_RANGE."""
    log_low, log_high = (math.log(bound) for bound in DT_INIT_RANGE)
    dt = torch.exp(torch.rand(count) * (log_high - log_low) + log_low).clamp(min=DT_INIT_FLOOR)
    return inverse_softplus(dt)


def inverse_softplus(y: Tensor) -> Tensor:
    """Return x with softplus(x) = y, stable for small y."""
    return y + torch.log(-torch.expm1(-y))
