"""Paged causal attention in plain torch, on any device.

Keys and values are gathered and passed to torch's attention: all decodes in one batch, every prefill alone. With a
sliding window, keys that no query of the step sees are not gathered.

Letters: T tokens, Hq query heads, Hkv key heads, J = Hq / Hkv query heads of a key head, D head size, NB blocks of B
tokens, R decodes, K keys of the longest decode, at most a window; S other sequences, Q places for the queries of each.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.ops.paged_attention.batch import PagedBatch, gather_slots

_SMALLEST_TILE = 128  # queries of a window; smaller tiles are slow
_MORE = 8  # channels, of which two are used: heads keep their alignment


@dataclass(frozen=True)
class PrefillPlan:
    """Plan to gather the keys of one sequence's queries, or of a tile of them.

    Attributes:
        queries: Slice of the queries on the token axis.
        kv_length: Number of keys.
        blocks: [ceil(kv_length / B)] int32.
        mask: [queries, kv_length] bool, True where a query sees a key; None if plain causal (equal lengths) or if the
            only query sees every key.
    """

    queries: slice
    kv_length: int
    blocks: Tensor
    mask: Tensor | None


@dataclass(frozen=True)
class GatherPlan:
    """Gather plan of a batch, made once a step.

    Attributes:
        decode_places: [R, K] int64, places of the last keys in the pool (block * B + offset); shorter sequences repeat
            their first place, which is always written.
        decode_mask: [R, 1, 1, K] bool, True at real keys; None if all are real.
        prefills: Plans of the other sequences; none if only the device knows lengths, see `attend_prefills`.
    """

    decode_places: Tensor
    decode_mask: Tensor | None
    prefills: tuple[PrefillPlan, ...]


@functools.cache
def _planner(window: int | None) -> Callable[[PagedBatch], GatherPlan]:
    """Return a planner, cached by window so that the layers of a step share its result."""

    def plan(batch: PagedBatch) -> GatherPlan:
        places, mask = _decode_places(batch, window)
        return GatherPlan(places, mask, () if batch.has_static_shapes else tuple(_prefill_plans(batch, window)))

    return plan


def _decode_places(batch: PagedBatch, window: int | None) -> tuple[Tensor, Tensor | None]:
    lengths, device = batch.kv_lengths[: batch.num_decode], batch.block_table.device
    longest = max(lengths, default=0) if window is None else min(window, max(lengths, default=0))
    ends = batch.seqlens_k[: batch.num_decode, None]
    first = (ends - longest).clamp(min=0)
    positions = first + torch.arange(longest, device=device)  # [R, K]
    is_real = positions < ends
    positions = positions.where(is_real, first)
    blocks = batch.block_table[: batch.num_decode].gather(1, positions // batch.block_size).long()
    are_all_real = not batch.has_static_shapes and min(lengths, default=longest) >= longest
    mask = None if are_all_real else is_real[:, None, None]
    return blocks * batch.block_size + positions % batch.block_size, mask


def _prefill_plans(batch: PagedBatch, window: int | None) -> Iterator[PrefillPlan]:
    """Plan each sequence; with a window in tiles, since few queries of a long prompt see a key."""
    first = batch.num_decode
    for row in range(batch.num_decode, len(batch.query_lengths)):
        queries = batch.query_lengths[row]
        tile = queries if window is None else max(window, _SMALLEST_TILE)
        for start in range(0, queries, tile):
            yield _tile_plan(batch, window, row, first, slice(start, min(start + tile, queries)))
        first += queries


def _tile_plan(batch: PagedBatch, window: int | None, row: int, first: int, tile: slice) -> PrefillPlan:
    """Plan a tile of queries of the sequence `row`, whose first query is `first` on the token axis."""
    size, count = batch.block_size, tile.stop - tile.start
    keys = batch.kv_lengths[row] - batch.query_lengths[row] + tile.stop  # up to the tile's last query
    skipped = 0 if window is None else max(0, keys - count - window + 1) // size  # blocks its first query does not see
    gathered = keys - skipped * size
    blocks = batch.block_table[row, skipped : -(-keys // size)]
    are_all_seen = window is None or gathered <= window
    mask = None if are_all_seen and count in (1, gathered) else _band(count, gathered, window, blocks.device)
    return PrefillPlan(slice(first + tile.start, first + tile.stop), gathered, blocks, mask)


def _band(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """Return the mask [queries, keys], True where query i, at the place of key keys - queries + i, sees key j."""
    last = keys - queries
    seen = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(last)
    return seen if window is None else seen.triu(last - window + 1)


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
    if window is not None and window >= max(batch.kv_lengths, default=0):
        window = None
    plan, decodes, parts = batch.prepared(_planner(window)), batch.num_decode, []
    grouped = None if sinks is None else sinks.unflatten(0, (key_cache.shape[2], -1)).unsqueeze(-1)  # [Hkv, J, 1]
    if decodes:
        parts.append(_decode(q[:decodes], key_cache, value_cache, plan, scale, grouped))
    if batch.has_static_shapes and len(batch.query_lengths) > decodes:
        parts.append(attend_prefills(q[decodes:], key_cache, value_cache, batch, scale, window, grouped))
    for own in plan.prefills:
        keys, values = _gather(key_cache, own), _gather(value_cache, own)
        parts.append(_prefill(q[own.queries], keys, values, own, scale, grouped))
    if q.shape[0] > batch.num_tokens:
        parts.append(q.new_zeros(q.shape[0] - batch.num_tokens, *q.shape[1:]))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _decode(
    q: Tensor, key_cache: Tensor, value_cache: Tensor, plan: GatherPlan, scale: float, sinks: Tensor | None
) -> Tensor:
    """Attend from one query of each sequence, all at once: [R, Hq, D]. A key head's query heads act as its queries."""
    keys, values = (gather_slots(cache, plan.decode_places).transpose(1, 2) for cache in (key_cache, value_cache))
    heads = q.unflatten(1, (keys.shape[1], -1))  # [R, Hkv, J, D]; keys [R, Hkv, K, D]
    out = attend(heads, keys, values, mask=plan.decode_mask, scale=scale, sinks=sinks)
    return out.reshape(q.shape)


def _gather(cache: Tensor, plan: PrefillPlan) -> Tensor:
    """Return a sequence's keys or values, [kv_length, Hkv, D], without entries after its last position."""
    return cache.index_select(0, plan.blocks).flatten(0, 1)[: plan.kv_length]


def _prefill(q: Tensor, keys: Tensor, values: Tensor, plan: PrefillPlan, scale: float, sinks: Tensor | None) -> Tensor:
    """Attend from all queries of one sequence: [queries, Hq, D]. Key heads act as the batch, so no key is repeated."""
    kv_heads = keys.shape[1]
    heads = q.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)  # [Hkv, J, queries, D]
    keys, values = (t.transpose(0, 1).unsqueeze(1) for t in (keys, values))  # [Hkv, 1, kv_length, D]
    sinks, is_causal = None if sinks is None else sinks.unsqueeze(-1), plan.mask is None and len(q) > 1
    out = attend(heads, keys, values, mask=plan.mask, is_causal=is_causal, scale=scale, sinks=sinks)
    return out.permute(2, 0, 1, 3).reshape(q.shape)


@dataclass(frozen=True)
class Spans:
    """Prefills of a step, each with the same number of query places.

    Attributes:
        places: [S, K] int64, places of keys in the pool (block * B + offset); entries after the keys repeat the first
            one.
        mask: [S, 1, 1, Q, K] bool, True where a query sees a key.
        queries: [S, Q] int64, the token at each place.
        origin: [T] int64, the flattened place of each token.
        is_real: [T] bool, True if a token belongs to a sequence.
    """

    places: Tensor
    mask: Tensor
    queries: Tensor
    origin: Tensor
    is_real: Tensor


def attend_prefills(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PagedBatch,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend from the queries [T, Hq, D] after the decodes, with lengths that only the device knows.

    Every shape follows from upper bounds, so two steps of one size run the same program on other numbers, as a CUDA
    graph needs. Surplus entries are masked. Sinks are [Hkv, J, 1] or None.
    """
    spans = batch.prepared(_prefills_of(window, len(q)))
    keys, values = (gather_slots(cache, spans.places) for cache in (key_cache, value_cache))  # [S, K, Hkv, D]
    placed = q[spans.queries]  # [S, Q, Hq, D]
    heads = placed.unflatten(2, (key_cache.shape[2], -1)).permute(0, 2, 3, 1, 4)  # [S, Hkv, J, Q, D]
    keys, values = (t.transpose(1, 2).unsqueeze(2) for t in (keys, values))
    sinks = None if sinks is None else sinks.unsqueeze(-1)
    out = attend(heads, keys, values, mask=spans.mask, scale=scale, sinks=sinks)
    out = out.permute(0, 3, 1, 2, 4).reshape(-1, *q.shape[1:]).index_select(0, spans.origin)
    return out.where(spans.is_real[:, None, None], 0)


@functools.cache
def _prefills_of(window: int | None, max_tokens: int) -> Callable[[PagedBatch], Spans]:
    """Return a planner of prefills with up to `max_tokens` queries in all, cached for all layers of a step."""

    def find(batch: PagedBatch) -> Spans:
        rows, device = slice(batch.num_decode, None), batch.block_table.device
        starts, lengths = batch.cu_seqlens_q[rows] - batch.num_decode, batch.seqlens_k[rows]  # [S+1], [S]
        place = torch.arange(max_tokens, device=device)
        queries = (starts[:-1, None] + place).clamp(max=max_tokens - 1)  # [S, Q]
        table = batch.block_table[rows].long()
        offsets = torch.arange(batch.block_size, device=device)
        places = (table.unsqueeze(-1) * batch.block_size + offsets).flatten(1)  # [S, K]
        keys = torch.arange(places.shape[1], device=device)
        is_key = keys < lengths[:, None]
        last = ((lengths - starts.diff())[:, None] + place).unsqueeze(-1)  # [S, Q, 1], the last key of each query
        mask = (keys <= last) & is_key[:, None]
        if window is not None:
            mask = mask & (keys > last - window)
        owners = torch.searchsorted(starts[1:].contiguous(), place, right=True).clamp(max=len(starts) - 2)  # [T]
        origin = owners * max_tokens + (place - starts[owners]).clamp(0, max_tokens - 1)
        places = places.where(is_key, places[:, :1])
        return Spans(places, mask[:, None, None], queries, origin, place < starts[-1])

    return find


def attend(
    heads: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    mask: Tensor | None,
    scale: float,
    is_causal: bool = False,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute torch's attention, with sinks if there are any: [..., Q, D].

    A sink is a learned score per query head that takes part in the softmax, and has no value. Torch's attention has
    none, so the sink becomes one more key: queries get channels that hold the sink over the scale, in two parts so that
    16 bits lose little of it; the additional key is 1 in these channels and 0 in all others, which are 0 in real keys.
    Its value is zero.

    Args:
        heads: Queries [..., Q, D].
        keys: [..., K, D], or with dimensions of one that are expanded.
        values: [..., K, D], likewise.
        mask: [..., Q, K] bool, True where a query sees a key, or None.
        scale: Factor of the scores.
        is_causal: Whether query i sees the keys up to i, without a mask.
        sinks: [..., Q or 1, 1] scores, or None.
    """
    shape = (*heads.shape[:-2], *keys.shape[-2:])
    if sinks is None:
        keys, values = keys.expand(shape), values.expand(shape)
        return F.scaled_dot_product_attention(heads, keys, values, attn_mask=mask, is_causal=is_causal, scale=scale)
    queries, channels = heads.shape[-2:]
    if is_causal:
        mask = torch.ones(queries, keys.shape[-2], dtype=torch.bool, device=heads.device).tril()
    wanted = (sinks.float() / scale).expand(*heads.shape[:-1], 1)
    high = wanted.to(heads.dtype)
    heads = F.pad(torch.cat([heads, high, (wanted - high.float()).to(heads.dtype)], dim=-1), (0, _MORE - 2))
    keys, values = (F.pad(one, (0, _MORE, 0, 1)) for one in (keys, values))
    keys[..., -1, channels : channels + 2] = 1
    if mask is not None:
        mask = F.pad(mask, (0, 1), value=True)
    shape = (*shape[:-2], *keys.shape[-2:])
    out = F.scaled_dot_product_attention(heads, keys.expand(shape), values.expand(shape), attn_mask=mask, scale=scale)
    return out[..., :channels]
