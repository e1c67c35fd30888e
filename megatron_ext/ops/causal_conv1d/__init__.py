"""Depthwise causal convolution with SiLU, as every recurrent layer here has it before its scan."""

from __future__ import annotations

from megatron_ext.ops.causal_conv1d import cpp, reference
from megatron_ext.ops.causal_conv1d.operator import CausalConv1d

CAUSAL_CONV1D = CausalConv1d(cpp.BACKEND, reference.BACKEND)

__all__ = ["CAUSAL_CONV1D"]
