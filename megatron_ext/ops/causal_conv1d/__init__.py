"""Depthwise causal convolution: with SiLU, as recurrent layers use it before their scan, and plain."""

from __future__ import annotations

from megatron_ext.ops.causal_conv1d import cpp, mamba_ssm, reference, triton
from megatron_ext.ops.causal_conv1d.operator import CausalConv1d

CAUSAL_CONV1D = CausalConv1d("causal_conv1d", cpp.BACKEND, triton.BACKEND, mamba_ssm.BACKEND, reference.BACKEND)
PLAIN_CONV1D = CausalConv1d("plain_conv1d", triton.PLAIN_BACKEND, mamba_ssm.PLAIN_BACKEND, reference.PLAIN_BACKEND)

__all__ = ["CAUSAL_CONV1D", "PLAIN_CONV1D", "CausalConv1d"]
