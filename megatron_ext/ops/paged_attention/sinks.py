"""Attention sinks: a learned score per query head that takes part in the softmax, and has no value.

Torch's attention has no sinks, so the sink becomes one more key: queries get channels that hold the sink over the
scale, in two parts so that 16 bits lose little of it; the additional key is 1 in these channels and 0 in all others,
which are 0 in real keys. Its value is zero.

Letters: J query heads of a key head, Q queries, K keys, D head size; ... the same leading dimensions.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_MORE = 8  # channels, of which two are used: heads keep their alignment


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


def by_group(sinks: Tensor | None, kv_heads: int) -> Tensor | None:
    """Return sinks [Hq] as [Hkv, J, 1], or None."""
    return None if sinks is None else sinks.unflatten(0, (kv_heads, -1)).unsqueeze(-1)
