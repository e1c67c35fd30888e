"""Mamba-2: heads with one decay each, in groups that share B and C."""

from __future__ import annotations

import math
from collections.abc import Mapping

from megatron_ext.config.checks import require
from megatron_ext.config.model_fields import GATE_FIRST, NORM_FIRST, ModelFields
from megatron_ext.config.recurrent.kind import RecurrentKind

MAMBA_LAYOUT = {  # of Mamba-1, too
    "mamba_state_dim": "--mamba-state-dim",
    "mamba_conv_kernel": "mamba_conv_kernel",
}


def check_mamba_window(config: ModelFields) -> None:
    """Require a convolution window of 2 or more, in Mamba-1, too."""
    require(config.mamba_conv_kernel >= 2, f"Mamba convolution window {config.mamba_conv_kernel} must be at least 2")


def _check(config: ModelFields) -> None:
    check_mamba_window(config)
    count, groups = config.mamba_heads, config.mamba_num_groups
    require(
        count > 0 and count % groups == 0,
        f"{count} Mamba heads cannot be shared by {groups} Mamba groups; the groups must divide the heads "
        "(--mamba-num-heads, --mamba-num-groups)",
    )


def _check_values(config: ModelFields) -> None:
    norm, multipliers = config.mamba_gated_norm, config.mamba_multipliers
    require(
        norm in (GATE_FIRST, NORM_FIRST, None),
        f"mamba_gated_norm {norm!r} is unknown; {GATE_FIRST}, {NORM_FIRST} or None",
    )
    if multipliers is not None:
        require(
            len(multipliers) == 5 and all(math.isfinite(m) and m > 0 for m in multipliers),
            f"mamba_multipliers {multipliers} must be five numbers above zero, for z, x, B, C and dt",
        )


def _mixer_params(config: ModelFields) -> Mapping[str, object]:
    return {
        "d_conv": config.mamba_conv_kernel,
        "gated_norm": config.mamba_gated_norm,
        "multipliers": config.mamba_multipliers,
    }


def _parameter_count(config: ModelFields) -> int:
    """Count in_proj to z, x, B, C and dt; the convolution of x, B and C; out_proj."""
    inner = config.mamba_heads * config.mamba_head_dim
    projected = 2 * inner + 2 * config.mamba_num_groups * config.mamba_state_dim + config.mamba_heads
    convolved = inner + 2 * config.mamba_num_groups * config.mamba_state_dim
    return config.hidden_size * (projected + inner) + convolved * config.mamba_conv_kernel


def _core_fields(config: ModelFields) -> Mapping[str, object]:
    return {
        "mamba_state_dim": config.mamba_state_dim,
        "mamba_head_dim": config.mamba_head_dim,
        "mamba_num_heads": config.mamba_heads,
        "mamba_num_groups": config.mamba_num_groups,
    }


MAMBA2 = RecurrentKind(
    name="mamba2",
    mixer=("megatron_ext.mixers.mamba2", "Mamba2Mixer"),
    stack_spec="hybrid_stack_spec",
    check=_check,
    check_values=_check_values,
    chunk_size=lambda config: config.mamba_chunk_size,
    parameter_count=_parameter_count,
    state_size=lambda config: config.mamba_heads * config.mamba_head_dim * config.mamba_state_dim,
    mixer_params=_mixer_params,
    core_fields=_core_fields,
    shared=lambda config: {"Mamba groups": config.mamba_num_groups, "Mamba heads": config.mamba_heads},
    layout={
        **MAMBA_LAYOUT,
        "mamba_head_dim": "--mamba-head-dim",
        "mamba_heads": "--mamba-num-heads",
        "mamba_num_groups": "--mamba-num-groups",
        "mamba_gated_norm": "mamba_gated_norm",
    },
)
