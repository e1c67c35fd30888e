"""State-space duality (Mamba-2): the chunked scan for prefill and training, and the one-token step for decode."""

from __future__ import annotations

from megatron_ext.ops.ssd.reference import SsdOutput, ssd_scan, ssd_step

__all__ = ["SsdOutput", "ssd_scan", "ssd_step"]
