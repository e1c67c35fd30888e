"""State-space duality (Mamba-2): the scan for prefill and training, and the one-token step for decode."""

from __future__ import annotations

from megatron_ext.ops.recurrence import Recurrence
from megatron_ext.ops.ssd import cpp, mamba_ssm, reference, triton

SSD = Recurrence("ssd", cpp.BACKEND, triton.BACKEND, mamba_ssm.BACKEND, reference.BACKEND)

__all__ = ["SSD"]
