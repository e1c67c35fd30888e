"""Selective scan (Mamba-1): the chunked scan for prefill and training, and the one-token step for decode."""

from __future__ import annotations

from megatron_ext.ops.selective_scan.reference import ScanOutput, selective_scan, selective_scan_step

__all__ = ["ScanOutput", "selective_scan", "selective_scan_step"]
