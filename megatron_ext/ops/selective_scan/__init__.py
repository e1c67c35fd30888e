"""Selective scan (Mamba-1): the chunked scan for prefill and training, and the one-token step for decode."""

from __future__ import annotations

from megatron_ext.ops import triton
from megatron_ext.ops.recurrence import Recurrence, cpp_backend
from megatron_ext.ops.selective_scan import reference

SELECTIVE_SCAN = Recurrence(
    "selective_scan",
    reference.selective_scan,
    reference.selective_scan_step,
    cpp_backend("selective", D=None),
    triton.backend(__name__),
)
