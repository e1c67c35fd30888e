"""Short convolution: a gated causal convolution; its state is its last inputs."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_ext.config.checks import require
from megatron_ext.config.model_fields import ModelFields
from megatron_ext.config.recurrent.kind import RecurrentKind

_CHUNK = 128  # tokens; determines only the positions where states can be kept


def _check(config: ModelFields) -> None:
    window = config.short_conv_kernel_dim
    require(window >= 2, f"--short-conv-kernel-dim {window} must be at least 2")


def _parameter_count(config: ModelFields) -> int:
    """Count in_proj to B, C and x; the convolution; out_proj."""
    return config.hidden_size * (4 * config.hidden_size + config.short_conv_kernel_dim)


def _mixer_params(config: ModelFields) -> Mapping[str, object]:
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
    layout={"short_conv_kernel_dim": "--short-conv-kernel-dim"},
)
