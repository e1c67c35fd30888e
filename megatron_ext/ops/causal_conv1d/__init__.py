"""Depthwise causal convolution: with SiLU, as recurrent layers use it before their scan, and plain."""

from __future__ import annotations

from megatron_ext.ops import triton
from megatron_ext.ops.causal_conv1d import reference
from megatron_ext.ops.recurrence import Recurrence, cpp_backend

_REFERENCE = reference.causal_conv1d, reference.causal_conv1d_step
_TRITON = triton.backend(__name__)
CAUSAL_CONV1D = Recurrence("causal_conv1d", *_REFERENCE, cpp_backend("conv"), _TRITON)
PLAIN_CONV1D = Recurrence("plain_conv1d", *_REFERENCE, _TRITON, activate=False)
