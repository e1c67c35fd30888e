"""Causal attention over keys and values in blocks of a shared pool."""

from __future__ import annotations

from torch import Tensor

from megatron_ext.ops import cpp, triton
from megatron_ext.ops.backends import FunctionBackend, Operator
from megatron_ext.ops.paged_attention import reference
from megatron_ext.ops.paged_attention.batch import PagedBatch, build_paged_batch


def _attend_in_cpp(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend with the kernels in `kernels.cpp`, which read keys and values from their blocks; windows in plain torch.

    Without a window a query's result is bit-identical for any cuts of its sequence and any other work.
    """
    if window is not None and max(batch.kv_lengths, default=0) > window:
        return reference.paged_attention(q, key_cache, value_cache, batch, scale=scale, window=window, sinks=sinks)
    where = (batch.block_table, batch.cu_seqlens_q, batch.seqlens_k)
    scores = None if sinks is None else sinks.float().contiguous()
    return cpp.kernels().paged_attention(q, key_cache, value_cache, *where, scale, scores)


PAGED_ATTENTION = Operator(
    "paged_attention",
    FunctionBackend(cpp.NAME, cpp.takes, {"paged_attention": _attend_in_cpp}.get),
    triton.backend(__name__),
)
paged_attention = PAGED_ATTENTION(reference.paged_attention)

__all__ = ["PAGED_ATTENTION", "PagedBatch", "build_paged_batch", "paged_attention"]
