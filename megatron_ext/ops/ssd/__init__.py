"""State-space duality (Mamba-2): the scan for prefill and training, and the one-token step for decode."""

from __future__ import annotations

from megatron_ext.ops.recurrence import Recurrence, cpp_backend
from megatron_ext.ops.ssd import mamba_ssm, reference, triton

SSD = Recurrence(
    "ssd", cpp_backend(reference.BACKEND, "ssd", D=None), triton.BACKEND, mamba_ssm.BACKEND, reference.BACKEND
)

__all__ = ["SSD"]
