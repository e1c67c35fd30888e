"""Gated delta rule (gated delta net): the chunked scan for prefill and training, and the one-token step."""

from __future__ import annotations

from megatron_ext.ops.gated_delta_rule import reference, triton
from megatron_ext.ops.recurrence import Recurrence, cpp_backend

GATED_DELTA_RULE = Recurrence(
    "gated_delta_rule",
    cpp_backend(reference.BACKEND, "gated_delta", normalize=False),
    triton.BACKEND,
    reference.BACKEND,
)

__all__ = ["GATED_DELTA_RULE"]
