"""Kinds of recurrent layers: a record of each, with everything outside its mixer and its operator.

The mixers (`mixers/`), the operators (`ops/`) and the tests of a kind are elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megatron_ext.config.model_fields import ModelFields
from megatron_ext.config.options import require


@dataclass(frozen=True)
class RecurrentKind:
    """Kind of recurrent layers. The mixer defines the shapes of the states.

    Attributes:
        name: Value of `--recurrent-layer`.
        mixer: Module and class name of the mixer; imported when layers are built.
        stack_spec: Name in `mcore.layer_specs` of the stack whose recurrent layers are of this kind.
        check: Check that raises a `ConfigError` for contradictory fields of such a model; None without any.
        chunk_size: Tokens of a chunk of the scan; at inference the maximum, see `memory.budget`.
        parameter_count: Parameters in the matrices and the convolution of one layer.
        state_size: Numbers in the recurrent state of one layer and sequence, without the convolution's window.
        mixer_params: Mixer parameters that megatron-core's configuration has no field for.
        core_fields: This kind's fields in megatron-core's configuration.
        shared: Counts that tensor-parallel ranks must divide evenly, by their name in error messages.
        layout: Further fields of `ModelFields` that decide how this kind's stored weights are sharded.
    """

    name: str
    mixer: tuple[str, str]
    stack_spec: str
    chunk_size: Callable[[ModelFields], int]
    parameter_count: Callable[[ModelFields], int]
    state_size: Callable[[ModelFields], int]
    mixer_params: Callable[[ModelFields], Mapping[str, object]]
    core_fields: Callable[[ModelFields], Mapping[str, object]]
    shared: Callable[[ModelFields], dict[str, int]]
    layout: tuple[str, ...]
    check: Callable[[ModelFields], None] | None = None


_MAMBA_LAYOUT = ("mamba_state_dim", "mamba_conv_kernel")  # of Mamba-1, too


def _mamba2_check(config: ModelFields) -> None:
    count, groups = config.mamba_heads, config.mamba_num_groups
    require(
        count > 0 and count % groups == 0,
        f"{count} Mamba heads cannot be shared by {groups} Mamba groups; the groups must divide the heads "
        "(--mamba-num-heads, --mamba-num-groups)",
    )


def _mamba2_parameter_count(config: ModelFields) -> int:
    """Count in_proj to z, x, B, C and dt; the convolution of x, B and C; out_proj."""
    inner = config.mamba_heads * config.mamba_head_dim
    projected = 2 * inner + 2 * config.mamba_num_groups * config.mamba_state_dim + config.mamba_heads
    convolved = inner + 2 * config.mamba_num_groups * config.mamba_state_dim
    return config.hidden_size * (projected + inner) + convolved * config.mamba_conv_kernel


# Mamba-2: heads with one decay each, in groups that share B and C.
MAMBA2 = RecurrentKind(
    name="mamba2",
    mixer=("megatron_ext.mixers.mamba2", "Mamba2Mixer"),
    stack_spec="hybrid_stack_spec",
    check=_mamba2_check,
    chunk_size=lambda config: config.mamba_chunk_size,
    parameter_count=_mamba2_parameter_count,
    state_size=lambda config: config.mamba_heads * config.mamba_head_dim * config.mamba_state_dim,
    mixer_params=lambda config: {
        "d_conv": config.mamba_conv_kernel,
        "gated_norm": config.mamba_gated_norm,
        "multipliers": config.mamba_multipliers,
    },
    core_fields=lambda config: {
        **{name: getattr(config, name) for name in ("mamba_state_dim", "mamba_head_dim", "mamba_num_groups")},
        "mamba_num_heads": config.mamba_heads,
    },
    shared=lambda config: {"Mamba groups": config.mamba_num_groups, "Mamba heads": config.mamba_heads},
    layout=(*_MAMBA_LAYOUT, "mamba_head_dim", "mamba_num_heads", "mamba_num_groups", "mamba_gated_norm"),
)


def _mamba1_parameter_count(config: ModelFields) -> int:
    """Count in_proj to x and z; the convolution of x; x_proj to dt, B and C; dt_proj; A_log; out_proj."""
    per_channel = 3 * config.hidden_size + 2 * config.dt_rank + 3 * config.mamba_state_dim + config.mamba_conv_kernel
    return config.mamba_channels * per_channel


# Mamba-1: channels with a decay for every state.
MAMBA1 = RecurrentKind(
    name="mamba1",
    mixer=("megatron_ext.mixers.mamba1", "Mamba1Mixer"),
    stack_spec="mamba1_stack_spec",
    chunk_size=lambda config: config.mamba_chunk_size,
    parameter_count=_mamba1_parameter_count,
    state_size=lambda config: config.mamba_channels * config.mamba_state_dim,
    mixer_params=lambda config: {
        "d_conv": config.mamba_conv_kernel,
        "d_inner": config.mamba_channels,
        "dt_rank": config.dt_rank,
        "inner_norm": config.mamba_inner_norm,
        "inner_norm_epsilon": config.inner_norm_epsilon,
    },
    core_fields=lambda config: {"mamba_state_dim": config.mamba_state_dim},
    shared=lambda config: {"channels of a Mamba-1 layer": config.mamba_channels},
    layout=(*_MAMBA_LAYOUT, "mamba_inner_size", "mamba_dt_rank", "mamba_inner_norm"),
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
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    require(
        values % keys == 0,
        f"--linear-num-key-heads {keys} cannot be shared evenly by --linear-num-value-heads {values}; the former "
        "must divide the latter",
    )


def _delta_net_parameter_count(config: ModelFields) -> int:
    """Count in_proj to query, key, value, gate, beta and alpha; the convolution of the first three; out_proj."""
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    projected = 2 * keys + 3 * values + 2 * config.linear_num_value_heads
    return config.hidden_size * projected + (2 * keys + values) * config.linear_conv_kernel_dim


# Gated delta net: a matrix for each value head, overwritten by the delta rule.
GATED_DELTA_NET = RecurrentKind(
    name="gated_delta_net",
    mixer=("megatron_ext.mixers.gated_delta_net", "GatedDeltaNetMixer"),
    stack_spec="gated_delta_net_stack_spec",
    check=_delta_net_check,
    chunk_size=lambda _: GATED_DELTA_CHUNK,
    parameter_count=_delta_net_parameter_count,
    state_size=lambda config: config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim,
    mixer_params=lambda config: {
        "norm_epsilon": config.linear_norm_epsilon,
        "max_strength": 2.0 if config.linear_allow_neg_eigval else 1.0,
    },
    core_fields=lambda config: {name: getattr(config, name) for name in _DELTA_NET_SIZES},
    shared=lambda config: {
        "key heads of a gated delta net": config.linear_num_key_heads,
        "value heads of a gated delta net": config.linear_num_value_heads,
    },
    layout=_DELTA_NET_SIZES,
)


_SHORT_CONV_CHUNK = 128  # tokens; determines only the positions where states can be kept


# Short convolution with gates; its state is its last inputs.
SHORT_CONV = RecurrentKind(
    name="short_conv",
    mixer=("megatron_ext.mixers.short_conv", "ShortConvMixer"),
    stack_spec="short_conv_stack_spec",
    chunk_size=lambda _: _SHORT_CONV_CHUNK,
    # in_proj to B, C and x; the convolution; out_proj
    parameter_count=lambda config: config.hidden_size * (4 * config.hidden_size + config.short_conv_kernel_dim),
    state_size=lambda _: 0,
    mixer_params=lambda config: {"d_conv": config.short_conv_kernel_dim},
    core_fields=lambda _: {},
    shared=lambda config: {"channels of a short convolution (--hidden-size)": config.hidden_size},
    layout=("short_conv_kernel_dim",),
)


RECURRENT_KINDS = {kind.name: kind for kind in (MAMBA2, MAMBA1, GATED_DELTA_NET, SHORT_CONV)}
