"""Selective scan (Mamba-1): the chunked scan for prefill and training, and the one-token step for decode."""

from __future__ import annotations

from megatron_ext.ops.recurrence import Recurrence
from megatron_ext.ops.selective_scan import cpp, mamba_ssm, reference, triton

SELECTIVE_SCAN = Recurrence("selective_scan", cpp.BACKEND, triton.BACKEND, mamba_ssm.BACKEND, reference.BACKEND)

__all__ = ["SELECTIVE_SCAN"]
