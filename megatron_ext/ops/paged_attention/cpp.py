"""Paged attention in C++, for CPUs: the kernels in `kernels.cpp` read keys and values from their blocks."""

from __future__ import annotations

from torch import Tensor

from megatron_ext.ops import cpp
from megatron_ext.ops.paged_attention.batch import PagedBatch
from megatron_ext.ops.paged_attention.reference import AttentionBackend


def paged_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute paged attention; a query's result is bit-identical for any cuts of its sequence and any other work."""
    where = (batch.block_table, batch.cu_seqlens_q, batch.seqlens_k)
    scores = None if sinks is None else sinks.float().contiguous()
    return cpp.kernels().paged_attention(q, key_cache, value_cache, *where, scale, scores)


BACKEND = AttentionBackend(cpp.NAME, cpp.takes, paged_attention)
