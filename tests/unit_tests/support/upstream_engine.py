"""Stand-ins that let megatron-core's own dynamic engine run on the CPU, without flash-attention; none is of ours.

Import this before any module of megatron-core: attention binds flash-attention's functions when it is imported.
"""

from __future__ import annotations

import functools
import importlib.machinery
import sys
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

CREATORS = ("empty", "full", "zeros", "ones", "tensor", "arange", "empty_like", "zeros_like")


def unpinned(create: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function of torch that ignores `pin_memory`, which needs an accelerator."""

    @functools.wraps(create)
    def call(*values: object, pin_memory: bool = False, **options: object) -> Tensor:
        return create(*values, **options)

    return call


def attend(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Causal attention of one request's last tokens: queries [Q, H, D], keys and values [K, G, D]."""
    count, length, group = len(queries), len(keys), queries.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", queries, keys) * scale
    hidden = torch.arange(length) > (torch.arange(count) + length - count)[:, None]
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)


def paged(cache: Tensor, table: Tensor, length: int) -> Tensor:
    """Tokens of one request in a cache [blocks, tokens, G, D]."""
    return cache[table.long()].flatten(0, 1)[:length]


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float,
    block_table: Tensor,
    **_: object,
) -> Tensor:
    out = torch.zeros_like(q)
    ends, lengths = cu_seqlens_q.tolist(), cu_seqlens_k.diff().tolist()
    for i, (first, end, length) in enumerate(zip(ends[:-1], ends[1:], lengths, strict=True)):
        if end > first:
            keys, values = (paged(one, block_table[i], length) for one in (k, v))
            out[first:end] = attend(q[first:end], keys, values, softmax_scale)
    return out


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    softmax_scale: float,
    block_table: Tensor,
    **_: object,
) -> Tensor:
    out = torch.zeros_like(q)
    for i, length in enumerate(cache_seqlens.tolist()):
        if length:
            keys, values = (paged(one, block_table[i], length) for one in (k_cache, v_cache))
            out[i] = attend(q[i], keys, values, softmax_scale)
    return out


def install() -> None:
    """Replace the functions in this process."""
    for name in CREATORS:
        setattr(torch, name, unpinned(getattr(torch, name)))
    module = ModuleType("flash_attn")
    module.__spec__ = importlib.machinery.ModuleSpec("flash_attn", None)
    module.__version__ = "2.8.0"
    module.flash_attn_varlen_func = flash_attn_varlen_func
    module.flash_attn_with_kvcache = flash_attn_with_kvcache
    sys.modules["flash_attn"] = module

    import megatron_ext.mcore  # isort: skip  # its stand-ins come before upstream's engine
    from megatron.core.inference.contexts import dynamic_context

    assert megatron_ext.mcore is not None
    dynamic_context.triton_append_key_value_cache = None  # else Triton's, although there is no GPU
