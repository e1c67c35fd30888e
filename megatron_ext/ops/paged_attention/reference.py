"""Paged causal attention in plain torch, on any device.

Keys and values are gathered and passed to torch's attention: all decodes in one batch, every prefill alone. With a
sliding window, keys that no query of the step sees are not gathered.

Letters: T tokens, Hq query heads, Hkv key heads, J = Hq / Hkv query heads of a key head, D head size, NB blocks of B
tokens, R decodes, K keys of the longest decode, at most a window.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ext.ops.backends import FunctionBackend, anything
from megatron_ext.ops.paged_attention.batch import PagedBatch, gather_slots
from megatron_ext.ops.paged_attention.sinks import attend, by_group
from megatron_ext.ops.paged_attention.static_shapes import static_shape_attention

_SMALLEST_TILE = 128  # queries of a window; smaller tiles are slow


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

    @property
    def is_causal(self) -> bool:
        """True if torch's own causal mask suffices."""
        return self.mask is None and self.queries.stop - self.queries.start > 1


@dataclass(frozen=True)
class GatherPlan:
    """Gather plan of a batch, made once a step.

    Attributes:
        decode_places: [R, K] int64, places of the last keys in the pool (block * B + offset); shorter sequences repeat
            their first place, which is always written.
        decode_mask: [R, 1, 1, K] bool, True at real keys; None if all are real.
        prefills: Plans of the other sequences.
    """

    decode_places: Tensor
    decode_mask: Tensor | None
    prefills: tuple[PrefillPlan, ...]


@functools.cache
def _planner(window: int | None) -> Callable[[PagedBatch], GatherPlan]:
    """Return a planner, cached by window so that the layers of a step share its result."""

    def plan(batch: PagedBatch) -> GatherPlan:
        places, mask = _decode_places(batch, window)
        return GatherPlan(places, mask, tuple(_prefill_plans(batch, window)))

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
    mask = None if min(lengths, default=longest) >= longest else is_real[:, None, None]
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
    if window is not None and window >= max(batch.kv_lengths, default=0):
        window = None
    if batch.has_static_shapes:
        return static_shape_attention(q, key_cache, value_cache, batch, scale=scale, window=window, sinks=sinks)
    plan, decodes, parts = batch.prepared(_planner(window)), batch.num_decode, []
    grouped = by_group(sinks, key_cache.shape[2])
    if decodes:
        parts.append(_decode(q[:decodes], key_cache, value_cache, plan, scale, grouped))
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
    sinks = None if sinks is None else sinks.unsqueeze(-1)
    out = attend(heads, keys, values, mask=plan.mask, is_causal=plan.is_causal, scale=scale, sinks=sinks)
    return out.permute(2, 0, 1, 3).reshape(q.shape)


BACKEND = FunctionBackend("reference", anything, paged_attention)
