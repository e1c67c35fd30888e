"""Paged causal attention in plain torch, on any device.

Letters: T tokens, Hq query heads, Hkv key heads, J = Hq / Hkv query heads of a key head, D head size, NB blocks of B
tokens, K keys of a row.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.ops.paged_attention.layout import PagedLayout, PrefillRow


def paged_attention(q: Tensor, key_cache: Tensor, value_cache: Tensor, layout: PagedLayout, *, scale: float) -> Tensor:
    """Let every query see the keys of its row up to its own position.

    Args:
        q: [T, Hq, D], rows in the layout's order; rows behind the layout's are not read.
        key_cache: [NB, B, Hkv, D], the queries' own keys written already. What lies behind a row's keys is never used
            and may be anything, NaN too.
        value_cache: The same for values.
        layout: Where each row's keys lie.
        scale: What the scores are multiplied with.

    Returns:
        [T, Hq, D], zero behind the layout's rows.
    """
    parts = []
    if layout.num_decode_rows:
        parts.append(_decode(q[: layout.num_decode_rows], key_cache, value_cache, layout, scale))
    for row in layout.prefill_rows:
        own = q[row.query_start : row.query_start + row.query_length]
        parts.append(_prefill(own, _gather(key_cache, row), _gather(value_cache, row), row, scale))
    if q.shape[0] > layout.num_tokens:
        parts.append(q.new_zeros(q.shape[0] - layout.num_tokens, *q.shape[1:]))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _decode(q: Tensor, key_cache: Tensor, value_cache: Tensor, layout: PagedLayout, scale: float) -> Tensor:
    """One query of each row, all rows at once: [rows, Hq, D]. A key head's query heads stand in as its queries."""
    kv_heads, head_size = key_cache.shape[2:]
    places = layout.decode_places
    keys, values = (
        cache.view(-1, kv_heads, head_size).index_select(0, places.view(-1)).unflatten(0, places.shape).transpose(1, 2)
        for cache in (key_cache, value_cache)
    )  # [rows, Hkv, K, D]
    heads = q.unflatten(1, (kv_heads, -1))  # [rows, Hkv, J, D]
    out = F.scaled_dot_product_attention(heads, keys, values, attn_mask=layout.decode_mask, scale=scale)
    return out.reshape(q.shape)


def _gather(cache: Tensor, row: PrefillRow) -> Tensor:
    """The row's keys or values: [kv_length, Hkv, D]; slots behind its last position are cut off."""
    return cache.index_select(0, row.blocks).flatten(0, 1)[: row.kv_length]


def _prefill(q: Tensor, keys: Tensor, values: Tensor, row: PrefillRow, scale: float) -> Tensor:
    """All queries of one row: [query_length, Hq, D]. Key heads stand in as the batch, so that none is repeated."""
    kv_heads = keys.shape[1]
    heads = q.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)  # [Hkv, J, query_length, D]
    keys, values = (
        t.transpose(0, 1).unsqueeze(1).expand(-1, heads.shape[1], -1, -1) for t in (keys, values)
    )  # [Hkv, J, kv_length, D]
    is_causal = row.mask is None and row.query_length > 1
    out = F.scaled_dot_product_attention(heads, keys, values, attn_mask=row.mask, is_causal=is_causal, scale=scale)
    return out.permute(2, 0, 1, 3).reshape(q.shape)
