"""Gated delta rule (gated delta net): the chunked scan for prefill and training, and the one-token step."""

from __future__ import annotations

from megatron_ext.ops import triton
from megatron_ext.ops.gated_delta_rule.reference import gated_delta_scan, gated_delta_step
from megatron_ext.ops.recurrence import Recurrence, cpp_backend

GATED_DELTA_RULE = Recurrence(
    "gated_delta_rule",
    gated_delta_scan,
    gated_delta_step,
    cpp_backend("gated_delta", normalize=False),
    triton.backend(__name__),
)
