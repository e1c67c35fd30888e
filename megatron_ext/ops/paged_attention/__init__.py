"""Causal attention over keys and values in blocks of a shared pool."""

from __future__ import annotations

from torch import Tensor

from megatron_ext.ops import cpp, triton
from megatron_ext.ops.backends import FunctionBackend, Operator
from megatron_ext.ops.paged_attention import reference
from megatron_ext.ops.paged_attention.batch import PagedBatch, StaticBatch, build_paged_batch


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


@PAGED_ATTENTION
def paged_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend from every query to the keys of its sequence up to its own position, or to the last `window` of them.

    Args:
        q: [T, Hq, D], sequences in the batch's order; later rows are not read.
        key_cache: [NB, B, Hkv, D], with the queries' own keys already written. Blocks are contiguous each and may lie
            any distance apart. Entries after a sequence's keys are never used and may be anything, NaN too.
        value_cache: [NB, B, Hkv, D], likewise for values.
        batch: Block table and lengths of the sequences.
        scale: Factor of the scores.
        window: Maximum number of keys that a query sees, its own the last of them; None for all.
        sinks: [Hq], for each head a score that takes part in the softmax and has no value; None for no sinks.

    Returns:
        [T, Hq, D], zero after the batch's sequences.
    """
    return reference.paged_attention(q, key_cache, value_cache, batch, scale=scale, window=window, sinks=sinks)


__all__ = ["PAGED_ATTENTION", "PagedBatch", "StaticBatch", "build_paged_batch", "paged_attention"]
