"""Paged causal attention in plain torch, on any device.

Keys and values are gathered and passed to torch's attention: all decodes in one batch, every prefill alone.

Letters: T tokens, Hq query heads, Hkv key heads, J = Hq / Hkv query heads of a key head, D head size, NB blocks of B
tokens, R decodes, W blocks of the longest table, K keys of the longest decode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ext.ops.backends import anything
from megatron_ext.ops.paged_attention.batch import PagedBatch
from megatron_ext.ops.paged_attention.gathers import gather_slots
from megatron_ext.ops.paged_attention.sinks import attend, by_group
from megatron_ext.ops.paged_attention.static_shapes import static_shape_attention


@dataclass(frozen=True)
class AttentionBackend:
    """Backend of paged attention.

    Attributes:
        name: Unique among the backends.
        takes: Returns whether the backend supports given queries.
        attend: Function with the signature of `paged_attention`, without `window` unless it has windows.
        has_windows: True if `attend` takes a `window`, too.
    """

    name: str
    takes: Callable[[Tensor], bool]
    attend: Callable[..., Tensor]
    has_windows: bool = False


@dataclass(frozen=True)
class PrefillPlan:
    """Plan to gather the keys of one sequence with any number of queries.

    Attributes:
        queries: Slice of its queries on the token axis.
        kv_length: Number of its keys.
        blocks: [ceil(kv_length / B)] int32.
        mask: [queries, kv_length] bool, True where a query sees a key; None if plain causal (equal lengths) or if its
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
        decode_places: [R, K] int64, the keys' places in the pool (block * B + offset); shorter sequences repeat their
            first place, which is always written.
        decode_mask: [R, 1, 1, K] bool, True at real keys; None if all are equally long.
        prefills: Plans of the other sequences.
    """

    decode_places: Tensor
    decode_mask: Tensor | None
    prefills: tuple[PrefillPlan, ...]


def plan_gathers(batch: PagedBatch) -> GatherPlan:
    """Plan the gathers of a batch; call through `batch.prepared(plan_gathers)`."""
    places, mask = _decode_places(batch)
    return GatherPlan(places, mask, tuple(_prefill_plans(batch)))


def _decode_places(batch: PagedBatch) -> tuple[Tensor, Tensor | None]:
    lengths, device = batch.kv_lengths[: batch.num_decode], batch.block_table.device
    longest = max(lengths, default=0)
    table = batch.block_table[: batch.num_decode, : -(-longest // batch.block_size)].long()  # [R, W]
    offsets = torch.arange(batch.block_size, device=device)
    places = (table.unsqueeze(-1) * batch.block_size + offsets).flatten(1)[:, :longest]
    if len(set(lengths)) <= 1:
        return places.contiguous(), None
    is_real = torch.arange(longest, device=device) < batch.seqlens_k[: batch.num_decode, None]
    return places.where(is_real, places[:, :1]), is_real[:, None, None]


def _prefill_plans(batch: PagedBatch) -> Sequence[PrefillPlan]:
    plans, first = [], batch.num_decode
    for row in range(batch.num_decode, len(batch.query_lengths)):
        queries, keys = batch.query_lengths[row], batch.kv_lengths[row]
        blocks = batch.block_table[row, : -(-keys // batch.block_size)]
        mask = None if queries in (1, keys) else _bottom_right_mask(queries, keys, blocks.device)
        plans.append(PrefillPlan(slice(first, first + queries), keys, blocks, mask))
        first += queries
    return plans


def _bottom_right_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """Return the mask [queries, keys], True where query i, at position keys - queries + i, sees key j."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def paged_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    if batch.has_static_shapes:
        return static_shape_attention(q, key_cache, value_cache, batch, scale=scale, sinks=sinks)
    return attend_gathered(q, key_cache, value_cache, batch, batch.prepared(plan_gathers), scale, sinks)


def attend_gathered(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PagedBatch,
    plan: GatherPlan,
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend to the keys of a gather plan."""
    decodes, parts = batch.num_decode, []
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


BACKEND = AttentionBackend("reference", anything, paged_attention)
