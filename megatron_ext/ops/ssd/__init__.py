"""State-space duality (Mamba-2): the scan for prefill and training, and the one-token step for decode."""

from __future__ import annotations

from megatron_ext.ops import triton
from megatron_ext.ops.recurrence import Recurrence, cpp_backend
from megatron_ext.ops.ssd.reference import ssd_scan, ssd_step

SSD = Recurrence("ssd", ssd_scan, ssd_step, cpp_backend("ssd", D=None), triton.backend(__name__))
