"""Selective scan (Mamba-1): the chunked scan for prefill and training, and the one-token step for decode."""

from __future__ import annotations

from megatron_ext.ops.recurrence import Recurrence, cpp_backend
from megatron_ext.ops.selective_scan import mamba_ssm, reference, triton

SELECTIVE_SCAN = Recurrence(
    "selective_scan",
    cpp_backend(reference.BACKEND, "selective", D=None),
    triton.BACKEND,
    mamba_ssm.BACKEND,
    reference.BACKEND,
)

__all__ = ["SELECTIVE_SCAN"]
