"""Causal attention over keys and values that lie in blocks of a shared pool."""

from __future__ import annotations

from megatron_ext.ops.paged_attention.layout import PagedLayout, PrefillRow, build_paged_layout
from megatron_ext.ops.paged_attention.reference import paged_attention

__all__ = ["PagedLayout", "PrefillRow", "build_paged_layout", "paged_attention"]
