"""Choosing the next token: one uniform number per request decides."""

from __future__ import annotations

from megatron_ext.ops.sampling.reference import sample_tokens

__all__ = ["sample_tokens"]
