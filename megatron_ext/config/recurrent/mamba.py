"""Fields common to Mamba-1 and Mamba-2."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.config.checks import bounded, flag, require
from megatron_ext.config.layers.stack import StackFields

LONGEST_WINDOW = 1024  # tokens; far more than any model has


@dataclass(frozen=True)
class MambaFields(StackFields):
    """Fields of Mamba layers of either version."""

    mamba_state_dim: int = flag(128, "State size of a Mamba layer")
    mamba_conv_kernel: int = bounded(4, most=LONGEST_WINDOW)
    mamba_chunk_size: int = 128


MAMBA_LAYOUT = {
    "mamba_state_dim": "--mamba-state-dim",
    "mamba_conv_kernel": "mamba_conv_kernel",
}


def check_window(config: MambaFields) -> None:
    """Require a convolution window of 2 or more."""
    require(config.mamba_conv_kernel >= 2, f"Mamba convolution window {config.mamba_conv_kernel} must be at least 2")
