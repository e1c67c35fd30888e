"""Step sizes and decays in plain torch, on any device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from megatron_ext.ops.backends import Backend, anything


@dataclass(frozen=True)
class StepSizeBackend(Backend):
    """Backend of step sizes and decays.

    Attributes:
        sizes: See `step_sizes`.
        decays: See `decays`.
    """

    sizes: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    decays: Callable[..., tuple[Tensor, Tensor]]


def step_sizes(dt: Tensor, bias: Tensor, A_log: Tensor) -> tuple[Tensor, Tensor]:
    return F.softplus(dt.float() + bias.float()), -A_log.float().exp()


def decays(
    beta: Tensor, alpha: Tensor, bias: Tensor, A_log: Tensor, *, max_strength: float = 1.0
) -> tuple[Tensor, Tensor]:
    sizes, rates = step_sizes(alpha, bias, A_log)
    strength = beta.float().sigmoid()
    if max_strength != 1.0:
        strength = strength * max_strength
    return rates * sizes, strength


BACKEND = StepSizeBackend("reference", anything, step_sizes, decays)
