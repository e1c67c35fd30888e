"""Paged attention in plain torch for sequence lengths that only the device knows.

Every shape follows from upper bounds, so two steps of one size run the same program on other numbers, as a CUDA graph
needs. Surplus entries are masked. Kernels that read block tables and lengths need none of this.

Letters: T tokens, Hq query heads, Hkv key heads, J = Hq / Hkv, D head size, B tokens of a block, R decodes, S other
sequences, Q places for the queries of each of them, K keys at most: blocks of the table times B.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ext.ops.paged_attention.batch import PagedBatch, gather_slots
from megatron_ext.ops.paged_attention.sinks import attend, by_group


@dataclass(frozen=True)
class Spans:
    """Sequences of a step, each with the same number of query places.

    Attributes:
        places: [S, K] int64, places of keys in the pool (block * B + offset); entries after the keys repeat the first
            one.
        mask: [S, 1, 1, Q, K] bool, True where a query sees a key.
        queries: [S, Q] int64, the token at each place; None for decodes, Q = 1, whose tokens are in order.
        origin: [T] int64, the flattened place of each token; None for decodes.
        is_real: [T] bool, True if a token belongs to a sequence; None for decodes.
    """

    places: Tensor
    mask: Tensor
    queries: Tensor | None = None
    origin: Tensor | None = None
    is_real: Tensor | None = None


def static_shape_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    decodes, parts = batch.num_decode, []
    if decodes:
        spans = batch.prepared(_decodes_of(window))
        parts.append(_attend(q[:decodes].unsqueeze(1), key_cache, value_cache, spans, scale, sinks)[:, 0])
    if len(batch.query_lengths) > decodes:
        spans = batch.prepared(_prefills_of(window, q.shape[0] - decodes))
        assert spans.queries is not None, "prefills have places"
        assert spans.origin is not None, "and tokens have one of them"
        assert spans.is_real is not None, "or none"
        out = _attend(q[decodes:][spans.queries], key_cache, value_cache, spans, scale, sinks)
        out = out.flatten(0, 1).index_select(0, spans.origin)
        parts.append(out.where(spans.is_real[:, None, None], 0))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


@functools.cache
def _decodes_of(window: int | None) -> Callable[[PagedBatch], Spans]:
    """Return a planner of decodes, cached by window so that the layers of a step share its result."""

    def find(batch: PagedBatch) -> Spans:
        rows = slice(batch.num_decode)
        last = batch.seqlens_k[rows, None] - 1
        return Spans(_places(batch, rows), _visible(batch, rows, last, window))

    return find


@functools.cache
def _prefills_of(window: int | None, max_tokens: int) -> Callable[[PagedBatch], Spans]:
    """Return a planner of prefills with up to `max_tokens` queries in all; cached likewise."""

    def find(batch: PagedBatch) -> Spans:
        rows, device = slice(batch.num_decode, None), batch.block_table.device
        starts = batch.cu_seqlens_q[rows] - batch.num_decode  # [S+1]
        place = torch.arange(max_tokens, device=device)
        queries = (starts[:-1, None] + place).clamp(max=max_tokens - 1)  # [S, Q]
        before = batch.seqlens_k[rows] - starts.diff()  # [S], keys before the first query
        mask = _visible(batch, rows, before[:, None] + place, window)
        owners = torch.searchsorted(starts[1:].contiguous(), place, right=True).clamp(max=len(starts) - 2)  # [T]
        origin = owners * max_tokens + (place - starts[owners]).clamp(0, max_tokens - 1)
        return Spans(_places(batch, rows), mask, queries, origin, place < starts[-1])

    return find


def _places(batch: PagedBatch, rows: slice) -> Tensor:
    table = batch.block_table[rows].long()
    offsets = torch.arange(batch.block_size, device=table.device)
    places = (table.unsqueeze(-1) * batch.block_size + offsets).flatten(1)  # [S, K]
    is_real = torch.arange(places.shape[1], device=table.device) < batch.seqlens_k[rows, None]
    return places.where(is_real, places[:, :1])


def _visible(batch: PagedBatch, rows: slice, positions: Tensor, window: int | None) -> Tensor:
    """Return the mask of keys that the queries at `positions` [S, Q] see: [S, 1, 1, Q, K]."""
    table = batch.block_table[rows]
    keys = torch.arange(table.shape[1] * batch.block_size, device=table.device)
    seen = (keys <= positions.unsqueeze(-1)) & (keys < batch.seqlens_k[rows, None, None])
    if window is not None:
        seen = seen & (keys > positions.unsqueeze(-1) - window)
    return seen[:, None, None]


def _attend(
    q: Tensor, key_cache: Tensor, value_cache: Tensor, spans: Spans, scale: float, sinks: Tensor | None
) -> Tensor:
    """Attend from the queries [S, Q, Hq, D] to the keys of `spans`; return [S, Q, Hq, D]."""
    kv_heads = key_cache.shape[2]
    keys, values = (gather_slots(cache, spans.places) for cache in (key_cache, value_cache))  # [S, K, Hkv, D]
    heads = q.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4)  # [S, Hkv, J, Q, D]
    keys, values = (t.transpose(1, 2).unsqueeze(2) for t in (keys, values))
    grouped = by_group(sinks, kv_heads)
    grouped = None if grouped is None else grouped.unsqueeze(-1)
    out = attend(heads, keys, values, mask=spans.mask, scale=scale, sinks=grouped)
    return out.permute(0, 3, 1, 2, 4).reshape(q.shape)
