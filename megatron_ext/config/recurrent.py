"""Kinds of recurrent layers: a record of each, with everything outside its mixer and its operator.

The mixers (`mixers/`), the operators (`ops/`) and the tests of a kind are elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megatron_ext.config.model_fields import GATE_FIRST, INNER_NORMS, NORM_FIRST, ModelFields
from megatron_ext.config.options import flag_of, require


@dataclass(frozen=True)
class RecurrentKind:
    """Kind of recurrent layers. The mixer defines the shapes of the states.

    Attributes:
        name: Value of `--recurrent-layer`.
        mixer: Module and class name of the mixer; imported when layers are built.
        stack_spec: Name in `mcore.layer_specs` of the stack whose recurrent layers are of this kind.
        check: Check of a model with layers of this kind; raises a `ConfigError` for inconsistent fields.
        check_values: Check of this kind's fields in every model, for values that are never valid.
        chunk_size: Tokens of a chunk of the scan; at inference the maximum, see `memory.budget`.
        parameter_count: Parameters in the matrices and the convolution of one layer.
        state_size: Numbers in the recurrent state of one layer and sequence, without the convolution's window.
        mixer_params: Mixer parameters that megatron-core's configuration has no field for.
        core_fields: This kind's fields in megatron-core's configuration.
        shared: Counts that tensor-parallel ranks must divide evenly, by their name in error messages.
        layout: Further fields and properties of `ModelFields` that decide how this kind's stored weights are sharded,
            each with its name in error messages: a flag, or the name of a field without one.
    """

    name: str
    mixer: tuple[str, str]
    stack_spec: str
    check: Callable[[ModelFields], None]
    chunk_size: Callable[[ModelFields], int]
    parameter_count: Callable[[ModelFields], int]
    state_size: Callable[[ModelFields], int]
    mixer_params: Callable[[ModelFields], Mapping[str, object]]
    core_fields: Callable[[ModelFields], Mapping[str, object]]
    shared: Callable[[ModelFields], dict[str, int]]
    layout: Mapping[str, str]
    check_values: Callable[[ModelFields], None] | None = None


_MAMBA_LAYOUT = {  # of Mamba-1, too
    "mamba_state_dim": "--mamba-state-dim",
    "mamba_conv_kernel": "mamba_conv_kernel",
}


def _check_mamba_window(config: ModelFields) -> None:
    """Require a convolution window of 2 or more, in Mamba-1, too."""
    require(config.mamba_conv_kernel >= 2, f"Mamba convolution window {config.mamba_conv_kernel} must be at least 2")


def _mamba2_check(config: ModelFields) -> None:
    _check_mamba_window(config)
    count, groups = config.mamba_heads, config.mamba_num_groups
    require(
        count > 0 and count % groups == 0,
        f"{count} Mamba heads cannot be shared by {groups} Mamba groups; the groups must divide the heads "
        "(--mamba-num-heads, --mamba-num-groups)",
    )


def _mamba2_check_values(config: ModelFields) -> None:
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


def _mamba2_mixer_params(config: ModelFields) -> Mapping[str, object]:
    return {
        "d_conv": config.mamba_conv_kernel,
        "gated_norm": config.mamba_gated_norm,
        "multipliers": config.mamba_multipliers,
    }


def _mamba2_parameter_count(config: ModelFields) -> int:
    """Count in_proj to z, x, B, C and dt; the convolution of x, B and C; out_proj."""
    inner = config.mamba_heads * config.mamba_head_dim
    projected = 2 * inner + 2 * config.mamba_num_groups * config.mamba_state_dim + config.mamba_heads
    convolved = inner + 2 * config.mamba_num_groups * config.mamba_state_dim
    return config.hidden_size * (projected + inner) + convolved * config.mamba_conv_kernel


def _mamba2_core_fields(config: ModelFields) -> Mapping[str, object]:
    return {
        "mamba_state_dim": config.mamba_state_dim,
        "mamba_head_dim": config.mamba_head_dim,
        "mamba_num_heads": config.mamba_heads,
        "mamba_num_groups": config.mamba_num_groups,
    }


# Mamba-2: heads with one decay each, in groups that share B and C.
MAMBA2 = RecurrentKind(
    name="mamba2",
    mixer=("megatron_ext.mixers.mamba2", "Mamba2Mixer"),
    stack_spec="hybrid_stack_spec",
    check=_mamba2_check,
    check_values=_mamba2_check_values,
    chunk_size=lambda config: config.mamba_chunk_size,
    parameter_count=_mamba2_parameter_count,
    state_size=lambda config: config.mamba_heads * config.mamba_head_dim * config.mamba_state_dim,
    mixer_params=_mamba2_mixer_params,
    core_fields=_mamba2_core_fields,
    shared=lambda config: {"Mamba groups": config.mamba_num_groups, "Mamba heads": config.mamba_heads},
    layout={
        **_MAMBA_LAYOUT,
        "mamba_head_dim": "--mamba-head-dim",
        "mamba_heads": "--mamba-num-heads",
        "mamba_num_groups": "--mamba-num-groups",
        "mamba_gated_norm": "mamba_gated_norm",
    },
)


def _check_inner_norm(config: ModelFields) -> None:
    """Require a known norm, and an epsilon above zero."""
    norm, epsilon = config.mamba_inner_norm, config.inner_norm_epsilon
    require(norm in INNER_NORMS, f"mamba_inner_norm {norm!r} is unknown; one of {', '.join(INNER_NORMS)}")
    require(math.isfinite(epsilon) and epsilon > 0, f"mamba_inner_norm_epsilon {epsilon} must be more than zero")


def _mamba1_parameter_count(config: ModelFields) -> int:
    """Count in_proj to x and z; the convolution of x; x_proj to dt, B and C; dt_proj; A_log; out_proj."""
    per_channel = 3 * config.hidden_size + 2 * config.dt_rank + 3 * config.mamba_state_dim + config.mamba_conv_kernel
    return config.mamba_channels * per_channel


def _mamba1_mixer_params(config: ModelFields) -> Mapping[str, object]:
    return {
        "d_conv": config.mamba_conv_kernel,
        "d_inner": config.mamba_channels,
        "dt_rank": config.dt_rank,
        "inner_norm": config.mamba_inner_norm,
        "inner_norm_epsilon": config.inner_norm_epsilon,
    }


# Mamba-1: channels with a decay for every state.
MAMBA1 = RecurrentKind(
    name="mamba1",
    mixer=("megatron_ext.mixers.mamba1", "Mamba1Mixer"),
    stack_spec="mamba1_stack_spec",
    check=_check_mamba_window,
    check_values=_check_inner_norm,
    chunk_size=lambda config: config.mamba_chunk_size,
    parameter_count=_mamba1_parameter_count,
    state_size=lambda config: config.mamba_channels * config.mamba_state_dim,
    mixer_params=_mamba1_mixer_params,
    core_fields=lambda config: {"mamba_state_dim": config.mamba_state_dim},
    shared=lambda config: {"channels of a Mamba-1 layer": config.mamba_channels},
    layout={
        **_MAMBA_LAYOUT,
        "mamba_channels": "--mamba-inner-size",
        "dt_rank": "--mamba-dt-rank",
        "mamba_inner_norm": "mamba_inner_norm",
    },
)


GATED_DELTA_CHUNK = 64  # tokens; a longer chunk costs more, a shorter one does not cost less
_DELTA_NET_SIZES = (  # the same names in megatron-core's configuration
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_conv_kernel_dim",
)


def _delta_net_check(config: ModelFields) -> None:
    keys, values, window = config.linear_num_key_heads, config.linear_num_value_heads, config.linear_conv_kernel_dim
    require(
        values % keys == 0,
        f"--linear-num-key-heads {keys} cannot be shared evenly by --linear-num-value-heads {values}; the former "
        "must divide the latter",
    )
    require(window >= 2, f"--linear-conv-kernel-dim {window} must be at least 2")


def _delta_net_check_values(config: ModelFields) -> None:
    epsilon = config.linear_norm_epsilon
    require(
        epsilon is None or (math.isfinite(epsilon) and epsilon > 0), f"linear_norm_epsilon {epsilon} must be above 0"
    )


def _delta_net_mixer_params(config: ModelFields) -> Mapping[str, object]:
    return {"norm_epsilon": config.linear_norm_epsilon, "max_strength": 2.0 if config.linear_allow_neg_eigval else 1.0}


def _delta_net_parameter_count(config: ModelFields) -> int:
    """Count in_proj to query, key, value, gate, beta and alpha; the convolution of the first three; out_proj."""
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    projected = 2 * keys + 3 * values + 2 * config.linear_num_value_heads
    return config.hidden_size * projected + (2 * keys + values) * config.linear_conv_kernel_dim


def _delta_net_state_size(config: ModelFields) -> int:
    return config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim


def _delta_net_core_fields(config: ModelFields) -> Mapping[str, object]:
    return {name: getattr(config, name) for name in _DELTA_NET_SIZES}


# Gated delta net: a matrix for each value head, overwritten by the delta rule.
GATED_DELTA_NET = RecurrentKind(
    name="gated_delta_net",
    mixer=("megatron_ext.mixers.gated_delta_net", "GatedDeltaNetMixer"),
    stack_spec="gated_delta_net_stack_spec",
    check=_delta_net_check,
    check_values=_delta_net_check_values,
    chunk_size=lambda _: GATED_DELTA_CHUNK,
    parameter_count=_delta_net_parameter_count,
    state_size=_delta_net_state_size,
    mixer_params=_delta_net_mixer_params,
    core_fields=_delta_net_core_fields,
    shared=lambda config: {
        "key heads of a gated delta net": config.linear_num_key_heads,
        "value heads of a gated delta net": config.linear_num_value_heads,
    },
    layout={name: flag_of(name) for name in _DELTA_NET_SIZES},
)


_SHORT_CONV_CHUNK = 128  # tokens; determines only the positions where states can be kept


def _short_conv_check(config: ModelFields) -> None:
    window = config.short_conv_kernel_dim
    require(window >= 2, f"--short-conv-kernel-dim {window} must be at least 2")


def _short_conv_parameter_count(config: ModelFields) -> int:
    """Count in_proj to B, C and x; the convolution; out_proj."""
    return config.hidden_size * (4 * config.hidden_size + config.short_conv_kernel_dim)


def _short_conv_mixer_params(config: ModelFields) -> Mapping[str, object]:
    return {"d_conv": config.short_conv_kernel_dim}


# Short convolution with gates; its state is its last inputs.
SHORT_CONV = RecurrentKind(
    name="short_conv",
    mixer=("megatron_ext.mixers.short_conv", "ShortConvMixer"),
    stack_spec="short_conv_stack_spec",
    check=_short_conv_check,
    chunk_size=lambda _: _SHORT_CONV_CHUNK,
    parameter_count=_short_conv_parameter_count,
    state_size=lambda _: 0,
    mixer_params=_short_conv_mixer_params,
    core_fields=lambda _: {},
    shared=lambda config: {"channels of a short convolution (--hidden-size)": config.hidden_size},
    layout={"short_conv_kernel_dim": "--short-conv-kernel-dim"},
)


RECURRENT_KINDS = {kind.name: kind for kind in (MAMBA2, MAMBA1, GATED_DELTA_NET, SHORT_CONV)}
