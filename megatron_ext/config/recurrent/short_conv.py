"""Short convolution: a gated causal convolution; its state is its last inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_ext.config.checks import flag, flag_of, flags_of, require
from megatron_ext.config.layers.stack import StackFields
from megatron_ext.config.recurrent.kind import RecurrentKind
from megatron_ext.config.recurrent.mamba import LONGEST_WINDOW

_CHUNK = 128  # tokens; determines only the positions where states can be kept


@dataclass(frozen=True)
class ShortConvFields(StackFields):
    """Fields of short convolutions, which have `hidden_size` channels."""

    short_conv_kernel_dim: int = flag(3, "Window of a short convolution, in tokens", most=LONGEST_WINDOW)


def _check(config: ShortConvFields) -> None:
    window = config.short_conv_kernel_dim
    require(window >= 2, f"--short-conv-kernel-dim {window} must be at least 2")


def _parameter_count(config: ShortConvFields) -> int:
    """Count in_proj to B, C and x; the convolution; out_proj."""
    return config.hidden_size * (4 * config.hidden_size + config.short_conv_kernel_dim)


def _mixer_params(config: ShortConvFields) -> Mapping[str, object]:
    return {"d_conv": config.short_conv_kernel_dim}


SHORT_CONV = RecurrentKind(
    name="short_conv",
    mixer=("megatron_ext.mixers.short_conv", "ShortConvMixer"),
    stack_spec="short_conv_stack_spec",
    check=_check,
    chunk_size=lambda _: _CHUNK,
    parameter_count=_parameter_count,
    state_size=lambda _: 0,
    mixer_params=_mixer_params,
    core_fields=lambda _: {},
    shared=lambda config: {"channels of a short convolution (--hidden-size)": config.hidden_size},
    layout={name: flag_of(name) for name in flags_of(ShortConvFields)},
)
