"""Gated delta net: a matrix for every value head, overwritten by the delta rule."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_ext.config.checks import flag, flag_of, flags_of, require
from megatron_ext.config.layers.stack import StackFields
from megatron_ext.config.recurrent.kind import RecurrentKind

GATED_DELTA_CHUNK = 64  # tokens; a longer chunk costs more, a shorter one does not cost less


@dataclass(frozen=True)
class GatedDeltaNetFields(StackFields):
    """Fields of gated delta net layers, with megatron-core's names."""

    linear_key_head_dim: int = flag(128, "Channels of a key head of a gated delta net")
    linear_value_head_dim: int = flag(128, "Channels of a value head of a gated delta net")
    linear_num_key_heads: int = flag(16, "Key heads of a gated delta net")
    linear_num_value_heads: int = flag(32, "Value heads of a gated delta net")
    linear_conv_kernel_dim: int = flag(4, "Convolution window of a gated delta net, in tokens", most=1024)
    linear_norm_epsilon: float | None = None  # of the output norm; default: norm_epsilon
    linear_allow_neg_eigval: bool = False  # the delta rule's strength is at most 2, not 1


def _check(config: GatedDeltaNetFields) -> None:
    keys, values, window = config.linear_num_key_heads, config.linear_num_value_heads, config.linear_conv_kernel_dim
    require(
        values % keys == 0,
        f"--linear-num-key-heads {keys} cannot be shared evenly by --linear-num-value-heads {values}; the former "
        "must divide the latter",
    )
    require(window >= 2, f"--linear-conv-kernel-dim {window} must be at least 2")


def _check_values(config: GatedDeltaNetFields) -> None:
    epsilon = config.linear_norm_epsilon
    require(
        epsilon is None or (math.isfinite(epsilon) and epsilon > 0), f"linear_norm_epsilon {epsilon} must be above 0"
    )


def _mixer_params(config: GatedDeltaNetFields) -> Mapping[str, object]:
    return {"norm_epsilon": config.linear_norm_epsilon, "max_strength": 2.0 if config.linear_allow_neg_eigval else 1.0}


def _parameter_count(config: GatedDeltaNetFields) -> int:
    """Count in_proj to query, key, value, gate, beta and alpha; the convolution of the first three; out_proj."""
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    projected = 2 * keys + 3 * values + 2 * config.linear_num_value_heads
    return config.hidden_size * projected + (2 * keys + values) * config.linear_conv_kernel_dim


def _state_size(config: GatedDeltaNetFields) -> int:
    return config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim


def _core_fields(config: GatedDeltaNetFields) -> Mapping[str, object]:
    return {name: getattr(config, name) for name in flags_of(GatedDeltaNetFields)}


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
    layout={name: flag_of(name) for name in flags_of(GatedDeltaNetFields)},
)
