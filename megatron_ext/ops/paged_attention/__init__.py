"""Causal attention over keys and values in blocks of a shared pool."""

from __future__ import annotations

from torch import Tensor

from megatron_ext.ops.backends import Backends
from megatron_ext.ops.paged_attention import cpp, flashinfer, reference, triton, windowed
from megatron_ext.ops.paged_attention.batch import PagedBatch, StaticBatch, build_paged_batch

PAGED_ATTENTION = Backends("paged_attention", cpp.BACKEND, triton.BACKEND, flashinfer.BACKEND, reference.BACKEND)


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

    If no sequence of the step is longer than the window, the window has no effect. Otherwise backends with windows
    compute the step, or else plain torch. All backends have sinks.

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
    backend = PAGED_ATTENTION.choose(q)
    if backend.has_windows:
        return backend.attend(q, key_cache, value_cache, batch, scale=scale, window=window, sinks=sinks)
    if window is not None and max(batch.kv_lengths, default=0) > window:
        return windowed.windowed_attention(q, key_cache, value_cache, batch, scale=scale, window=window, sinks=sinks)
    return backend.attend(q, key_cache, value_cache, batch, scale=scale, sinks=sinks)


__all__ = ["PAGED_ATTENTION", "PagedBatch", "StaticBatch", "build_paged_batch", "paged_attention"]
