"""Paged attention in C++, for CPUs: keys and values are read in their blocks by `kernels.cpp` beside this file."""

from __future__ import annotations

from torch import Tensor

from megatron_ext.ops import cpp
from megatron_ext.ops.paged_attention.batch import PagedBatch
from megatron_ext.ops.paged_attention.reference import AttentionBackend


def paged_attention(q: Tensor, key_cache: Tensor, value_cache: Tensor, batch: PagedBatch, *, scale: float) -> Tensor:
    """See the operator. A query's result is the same bits however its sequence was cut, and whatever runs beside it."""
    where = (batch.block_table, batch.cu_seqlens_q, batch.seqlens_k)
    return cpp.kernels().paged_attention(q, key_cache, value_cache, *where, scale)


BACKEND = AttentionBackend(cpp.NAME, cpp.takes, paged_attention)
