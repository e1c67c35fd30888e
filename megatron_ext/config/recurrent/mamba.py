"""Checks and weight layout common to Mamba-1 and Mamba-2."""

from __future__ import annotations

from megatron_ext.config.checks import require
from megatron_ext.config.model_fields import ModelFields

MAMBA_LAYOUT = {
    "mamba_state_dim": "--mamba-state-dim",
    "mamba_conv_kernel": "mamba_conv_kernel",
}


def check_window(config: ModelFields) -> None:
    """Require a convolution window of 2 or more."""
    require(config.mamba_conv_kernel >= 2, f"Mamba convolution window {config.mamba_conv_kernel} must be at least 2")
