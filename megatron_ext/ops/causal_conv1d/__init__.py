"""Depthwise causal convolution with SiLU, as every Mamba variant has it before its scan."""

from __future__ import annotations

from megatron_ext.ops.causal_conv1d.reference import causal_conv1d, causal_conv1d_step, conv_states_after

__all__ = ["causal_conv1d", "causal_conv1d_step", "conv_states_after"]
