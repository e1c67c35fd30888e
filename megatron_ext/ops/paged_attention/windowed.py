"""Paged attention with a sliding window, in plain torch, on any device.

Keys that no query of the step sees are not gathered. Letters as in reference.py; N keys of a window.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron_ext.ops.paged_attention.batch import PagedBatch
from megatron_ext.ops.paged_attention.reference import GatherPlan, PrefillPlan, attend_gathered
from megatron_ext.ops.paged_attention.static_shapes import static_shape_attention

_SMALLEST_TILE = 128  # queries; smaller tiles are slow


def windowed_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    window: int,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute paged attention with a `window` of N keys."""
    if batch.has_static_shapes:
        return static_shape_attention(q, key_cache, value_cache, batch, scale=scale, window=window, sinks=sinks)
    return attend_gathered(q, key_cache, value_cache, batch, batch.prepared(_planner(window)), scale, sinks)


@functools.cache
def _planner(window: int) -> Callable[[PagedBatch], GatherPlan]:
    """Return a planner, cached by window so that the layers of a step share its result."""

    def plan(batch: PagedBatch) -> GatherPlan:
        places, mask = _decode_places(batch, window)
        return GatherPlan(places, mask, tuple(_prefill_plans(batch, window)))

    return plan


def _decode_places(batch: PagedBatch, window: int) -> tuple[Tensor, Tensor]:
    """Return places [R, K] of each sequence's last N keys, and the mask of real keys [R, 1, 1, K]; see `GatherPlan`."""
    device, decodes = batch.block_table.device, batch.num_decode
    longest = min(window, max(batch.kv_lengths[:decodes], default=0))
    lengths = batch.seqlens_k[:decodes, None]
    first = (lengths - window).clamp(min=0)
    positions = first + torch.arange(longest, device=device)  # [R, K]
    is_real = positions < lengths
    positions = positions.where(is_real, first)
    blocks = batch.block_table[:decodes].gather(1, positions // batch.block_size).long()
    return blocks * batch.block_size + positions % batch.block_size, is_real[:, None, None]


def _prefill_plans(batch: PagedBatch, window: int) -> Sequence[PrefillPlan]:
    """Plan a sequence's queries in tiles, each with the keys that it sees: few queries of a long prompt see a key."""
    plans, first = [], batch.num_decode
    for row in range(batch.num_decode, len(batch.query_lengths)):
        queries = batch.query_lengths[row]
        for start in range(0, queries, tile := max(window, _SMALLEST_TILE)):
            plans.append(_tile_plan(batch, window, row, first, slice(start, min(start + tile, queries))))
        first += queries
    return plans


def _tile_plan(batch: PagedBatch, window: int, row: int, first: int, tile: slice) -> PrefillPlan:
    """Plan a tile of queries of the sequence `row`, whose first query is `first` on the token axis."""
    size, count = batch.block_size, tile.stop - tile.start
    keys = batch.kv_lengths[row] - batch.query_lengths[row] + tile.stop  # up to the tile's last query
    skipped = max(0, keys - count - window + 1) // size  # blocks that its first query does not see
    gathered = keys - skipped * size
    blocks = batch.block_table[row, skipped : -(-keys // size)]
    mask = _band(count, gathered, window, blocks.device)
    return PrefillPlan(slice(first + tile.start, first + tile.stop), gathered, blocks, mask)


def _band(queries: int, keys: int, window: int, device: torch.device) -> Tensor:
    """Return the mask [queries, keys], True where query i, at the place of key keys - queries + i, sees key j."""
    last = keys - queries
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(last).triu(last - window + 1)
