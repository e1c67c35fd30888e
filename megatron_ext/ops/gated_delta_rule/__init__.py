"""Gated delta rule (gated delta net): the chunked scan for prefill and training, and the one-token step."""

from __future__ import annotations

from megatron_ext.ops.gated_delta_rule import cpp, reference, triton
from megatron_ext.ops.recurrence import Recurrence

GATED_DELTA_RULE = Recurrence("gated_delta_rule", cpp.BACKEND, triton.BACKEND, reference.BACKEND)

__all__ = ["GATED_DELTA_RULE"]
