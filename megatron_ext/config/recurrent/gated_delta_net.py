"""Gated delta net: a matrix for every value head, overwritten by the delta rule."""

from __future__ import annotations

import math
from collections.abc import Mapping

from megatron_ext.config.checks import flag_of, require
from megatron_ext.config.model_fields import ModelFields
from megatron_ext.config.recurrent.kind import RecurrentKind

GATED_DELTA_CHUNK = 64  # tokens; a longer chunk costs more, a shorter one does not cost less
_SIZES = (  # the same names in megatron-core's configuration
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_conv_kernel_dim",
)


def _check(config: ModelFields) -> None:
    keys, values, window = config.linear_num_key_heads, config.linear_num_value_heads, config.linear_conv_kernel_dim
    require(
        values % keys == 0,
        f"--linear-num-key-heads {keys} cannot be shared evenly by --linear-num-value-heads {values}; the former "
        "must divide the latter",
    )
    require(window >= 2, f"--linear-conv-kernel-dim {window} must be at least 2")


def _check_values(config: ModelFields) -> None:
    epsilon = config.linear_norm_epsilon
    require(
        epsilon is None or (math.isfinite(epsilon) and epsilon > 0), f"linear_norm_epsilon {epsilon} must be above 0"
    )


def _mixer_params(config: ModelFields) -> Mapping[str, object]:
    return {"norm_epsilon": config.linear_norm_epsilon, "max_strength": 2.0 if config.linear_allow_neg_eigval else 1.0}


def _parameter_count(config: ModelFields) -> int:
    """Count in_proj to query, key, value, gate, beta and alpha; the convolution of the first three; out_proj."""
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    projected = 2 * keys + 3 * values + 2 * config.linear_num_value_heads
    return config.hidden_size * projected + (2 * keys + values) * config.linear_conv_kernel_dim


def _state_size(config: ModelFields) -> int:
    return config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim


def _core_fields(config: ModelFields) -> Mapping[str, object]:
    return {name: getattr(config, name) for name in _SIZES}


GATED_DELTA_NET = RecurrentKind(
    name="gated_delta_net",
    mixer=("megatron_ext.mixers.gated_delta_net", "GatedDeltaNetMixer"),
    stack_spec="gated_delta_net_stack_spec",
    check=_check,
    check_values=_check_values,
    chunk_size=lambda _: GATED_DELTA_CHUNK,
    parameter_count=_parameter_count,
    state_size=_state_size,
    mixer_params=_mixer_params,
    core_fields=_core_fields,
    shared=lambda config: {
        "key heads of a gated delta net": config.linear_num_key_heads,
        "value heads of a gated delta net": config.linear_num_value_heads,
    },
    layout={name: flag_of(name) for name in _SIZES},
)
