"""Mamba-1 layers in tests: made to forget slowly, and recomputed one token at a time."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.mixers.mamba1 import Mamba1Mixer
from megatron_ext.mixers.mixer import inverse_softplus


def slow_down_mamba1(mixer: Mamba1Mixer, generator: torch.Generator) -> None:
    """Let a state halve over some hundred tokens and more: A in 0.01 .. 0.1, dt around 0.01 .. 0.05 (in place)."""

    def uniform(parameter: Tensor, low: float, high: float) -> Tensor:
        return parameter.uniform_(low, high, generator=generator)

    uniform(mixer.A_log, 0.01, 0.1).log_()
    mixer.dt_proj.bias.copy_(inverse_softplus(uniform(mixer.dt_proj.bias, 0.01, 0.05)))
    mixer.dt_proj.weight *= 0.3  # what dt gets from the token
    mixer.x_proj.weight[mixer.dt_rank :] *= 3.0  # B, C
    mixer.in_proj.weight[: mixer.d_inner_local] *= 2.0  # x
    mixer.D.fill_(0.05)  # the way past the state
    for norm in (mixer.dt_layernorm, mixer.b_layernorm, mixer.c_layernorm):
        for weight in norm.parameters():
            uniform(weight, 0.5, 1.5)


def recur_mamba1(mixer: Mamba1Mixer, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Final states of one layer for the inputs `hidden` [T, h], one token at a time, in fp64.

    Mamba-1 with A per channel and state: state <- exp(dt * A) * state + dt * x * B; the convolution state is the last
    K - 1 columns of x before the convolution, oldest first, zeros before the sequence.
    """
    window, channels, rank = mixer.d_conv, mixer.d_inner_local, mixer.dt_rank
    columns = hidden.double() @ mixer.in_proj.weight.double()[:channels].T  # [T, D]
    weight, bias = mixer.conv1d.weight.double()[:, 0], mixer.conv1d.bias.double()
    a, x_proj, dt_proj = -torch.exp(mixer.A_log.double()), mixer.x_proj.weight.double(), mixer.dt_proj.weight.double()
    padded = torch.cat([columns.new_zeros(window - 1, channels), columns])
    state = torch.zeros_like(a)
    for t in range(len(hidden)):
        x = F.silu((padded[t : t + window].T * weight).sum(-1) + bias)  # [D]
        dt, b, _ = (x_proj @ x).split([rank, mixer.d_state, mixer.d_state])
        dt, b = _normed(mixer.dt_layernorm, dt), _normed(mixer.b_layernorm, b)
        step = F.softplus(dt_proj @ dt + mixer.dt_proj.bias.double())
        state = torch.exp(step[:, None] * a) * state + (step * x)[:, None] * b
    return padded[-(window - 1) :].T.float(), state.float()


def _normed(norm: torch.nn.Module, values: Tensor) -> Tensor:
    if isinstance(norm, torch.nn.Identity):
        return values
    scaled = values / (values.square().mean() + norm.epsilon).sqrt()
    return scaled if norm.weight is None else scaled * norm.weight.double()
