"""The gated delta rule (gated delta net): the chunked scan for prefill and training, and the one-token step."""

from __future__ import annotations

from megatron_ext.ops.gated_delta_rule.reference import DeltaOutput, gated_delta_scan, gated_delta_step

__all__ = ["DeltaOutput", "gated_delta_scan", "gated_delta_step"]
