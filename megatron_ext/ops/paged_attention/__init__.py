"""Causal attention over keys and values that lie in blocks of a shared pool."""

from __future__ import annotations

from torch import Tensor

from megatron_ext.ops.backends import Backends
from megatron_ext.ops.paged_attention import cpp, reference, triton, windowed
from megatron_ext.ops.paged_attention.batch import PagedBatch, StaticBatch, build_paged_batch

PAGED_ATTENTION = Backends("paged_attention", cpp.BACKEND, triton.BACKEND, reference.BACKEND)


def paged_attention(
    q: Tensor, key_cache: Tensor, value_cache: Tensor, batch: PagedBatch, *, scale: float, window: int | None = None
) -> Tensor:
    """Let every query see the keys of its sequence up to its own position, or the last of them.

    In a step without a sequence longer than the window that is the same. Others are for backends that have windows, and
    for plain torch.

    Args:
        q: [T, Hq, D], sequences in the batch's order; rows behind theirs are not read.
        key_cache: [NB, B, Hkv, D], the queries' own keys written already. What lies behind a sequence's keys is never
            used and may be anything, NaN too.
        value_cache: The same for values.
        batch: Where each sequence's keys lie.
        scale: What the scores are multiplied with.
        window: Keys that a query sees at most, its own the last of them; None for all.

    Returns:
        [T, Hq, D], zero behind the batch's sequences.
    """
    backend = PAGED_ATTENTION.choose(q)
    if backend.has_windows:
        return backend.attend(q, key_cache, value_cache, batch, scale=scale, window=window)
    if window is not None and max(batch.kv_lengths, default=0) > window:
        return windowed.windowed_attention(q, key_cache, value_cache, batch, scale=scale, window=window)
    return backend.attend(q, key_cache, value_cache, batch, scale=scale)


__all__ = ["PAGED_ATTENTION", "PagedBatch", "StaticBatch", "build_paged_batch", "paged_attention"]
