"""Mamba-1: channels with a decay for every state."""

from __future__ import annotations

import math
from collections.abc import Mapping

from megatron_ext.config.checks import require
from megatron_ext.config.model_fields import INNER_NORMS, ModelFields
from megatron_ext.config.recurrent.kind import RecurrentKind
from megatron_ext.config.recurrent.mamba2 import MAMBA_LAYOUT, check_mamba_window


def _check_inner_norm(config: ModelFields) -> None:
    """Require a known norm, and an epsilon above zero."""
    norm, epsilon = config.mamba_inner_norm, config.inner_norm_epsilon
    require(norm in INNER_NORMS, f"mamba_inner_norm {norm!r} is unknown; one of {', '.join(INNER_NORMS)}")
    require(math.isfinite(epsilon) and epsilon > 0, f"mamba_inner_norm_epsilon {epsilon} must be more than zero")


def _parameter_count(config: ModelFields) -> int:
    """Count in_proj to x and z; the convolution of x; x_proj to dt, B and C; dt_proj; A_log; out_proj."""
    per_channel = 3 * config.hidden_size + 2 * config.dt_rank + 3 * config.mamba_state_dim + config.mamba_conv_kernel
    return config.mamba_channels * per_channel


def _mixer_params(config: ModelFields) -> Mapping[str, object]:
    return {
        "d_conv": config.mamba_conv_kernel,
        "d_inner": config.mamba_channels,
        "dt_rank": config.dt_rank,
        "inner_norm": config.mamba_inner_norm,
        "inner_norm_epsilon": config.inner_norm_epsilon,
    }


MAMBA1 = RecurrentKind(
    name="mamba1",
    mixer=("megatron_ext.mixers.mamba1", "Mamba1Mixer"),
    stack_spec="mamba1_stack_spec",
    check=check_mamba_window,
    check_values=_check_inner_norm,
    chunk_size=lambda config: config.mamba_chunk_size,
    parameter_count=_parameter_count,
    state_size=lambda config: config.mamba_channels * config.mamba_state_dim,
    mixer_params=_mixer_params,
    core_fields=lambda config: {"mamba_state_dim": config.mamba_state_dim},
    shared=lambda config: {"channels of a Mamba-1 layer": config.mamba_channels},
    layout={
        **MAMBA_LAYOUT,
        "mamba_channels": "--mamba-inner-size",
        "dt_rank": "--mamba-dt-rank",
        "mamba_inner_norm": "mamba_inner_norm",
    },
)
