"""Depthwise causal convolution: with SiLU, as recurrent layers use it before their scan, and plain."""

from __future__ import annotations

from megatron_ext.ops.causal_conv1d import mamba_ssm, reference, triton
from megatron_ext.ops.recurrence import Recurrence, cpp_backend

CAUSAL_CONV1D = Recurrence(
    "causal_conv1d",
    cpp_backend(reference.BACKEND, "conv"),
    triton.BACKEND,
    mamba_ssm.BACKEND,
    reference.BACKEND,
)
PLAIN_CONV1D = Recurrence("plain_conv1d", triton.PLAIN_BACKEND, mamba_ssm.PLAIN_BACKEND, reference.PLAIN_BACKEND)

__all__ = ["CAUSAL_CONV1D", "PLAIN_CONV1D"]
