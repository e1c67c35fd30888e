"""Paged attention in Triton, for CUDA devices, with the kernels in `kernels.py`.

Grid sizes depend on shapes (rows and width of the block table, the token axis), not on lengths: a CUDA graph of one
step is right for every other step of the same shapes. Sequences without keys yield zeros.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from megatron_ext.ops import triton
from megatron_ext.ops.paged_attention import reference, windowed
from megatron_ext.ops.paged_attention.batch import PagedBatch
from megatron_ext.ops.triton.launching import own_rows, rows_of, say_reference_computes, tile_count

MAX_CHANNELS = 256
NO_WINDOW = 1 << 30  # tokens; more than any sequence has
ENOUGH_PROGRAMS, FEWEST_A_TILE = 1024, 4
"""Programs of a decode's grid: enough for every multiprocessor to have several, or, with many rows, four for each tile
of rows, which take turns over its spans. Most requests are shorter than the block table is wide."""


@functools.cache
def _kernels() -> ModuleType:
    from megatron_ext.ops.paged_attention import kernels

    return kernels


@dataclass(frozen=True)
class _Call:
    """Arguments of one call, in the terms of the kernels."""

    q: Tensor
    key_cache: Tensor
    value_cache: Tensor
    batch: PagedBatch
    scale: float
    window: int
    sinks: Tensor

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.q.shape[1] // self.key_cache.shape[2]

    @property
    def shape(self) -> tuple[tuple[str, ...], int]:
        """Dtypes and padded channels, which determine the configuration."""
        types = _kernels().WIDE if self.q.dtype == torch.float32 else _kernels().NARROW
        return types, triton.padded(self.q.shape[2])

    def arguments(self) -> dict[str, Tensor | int | float]:
        """Return the arguments that both kernels take."""
        keys, values, table = self.key_cache, self.value_cache, self.batch.block_table
        return {
            "q": self.q,
            "key_cache": keys,
            "value_cache": values,
            "block_table": table,
            "group_size": self.group_size,
            "window": self.window,
            "scale": self.scale * math.log2(math.e),
            "block_size": self.batch.block_size,
            "head_size": self.q.shape[2],
            "table_row": table.stride(0),
            "q_row": self.q.stride(0),
            "block_stride": keys.stride(0),
            "token_stride": keys.stride(1),
        }


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
    """Compute paged attention, optionally with a `window` and `sinks`.

    The keys of the first `num_decode` sequences, with few queries each, are split among programs, 512 keys to each. For
    every other sequence a program computes a tile of queries over all keys. The choice depends on `num_decode` alone,
    and both kernels compute a query from its own keys alone.
    """
    lack = _lacks(q, key_cache, value_cache)
    if lack is not None:
        say_reference_computes(lack)
        if window is None:
            return reference.paged_attention(q, key_cache, value_cache, batch, scale=scale, sinks=sinks)
        return windowed.windowed_attention(q, key_cache, value_cache, batch, scale=scale, window=window, sinks=sinks)
    scores = _no_sinks(q.shape[1], q.device) if sinks is None else sinks.float().contiguous()
    call = _Call(_aligned(q), key_cache, value_cache, batch, scale, NO_WINDOW if window is None else window, scores)
    decoded = sum(batch.query_lengths[: batch.num_decode])
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if decoded:
        _attend_few(call, out)
    if decoded < len(out):
        _attend_many(call, out, decoded)
    return out


@functools.cache
def _no_sinks(heads: int, device: torch.device) -> Tensor:
    """Return sinks that change nothing, [heads]; made once, so that no layer of a step fills them."""
    return torch.full((heads,), -torch.inf, dtype=torch.float32, device=device)


def _lacks(q: Tensor, key_cache: Tensor, value_cache: Tensor) -> str | None:
    """Return why there is no kernel for these inputs; None if there is one."""
    if q.dtype != key_cache.dtype:
        return f"paged attention has no kernel for queries of {q.dtype} and keys of {key_cache.dtype}"
    if not own_rows(key_cache) or key_cache.stride() != value_cache.stride():
        return "paged attention has no kernel for keys and values with different layouts"
    if q.shape[2] > MAX_CHANNELS:
        return f"paged attention has no kernel for heads of {q.shape[2]} channels, only for up to {MAX_CHANNELS}"
    if not _is_aligned(q, key_cache, value_cache):
        sizes = f"heads of {q.shape[2]} channels and blocks {key_cache.stride(0)} elements apart"
        return f"paged attention has no kernel for {sizes}, only for multiples of 16"
    return _kernels().paged_prefill.lacks(T=q.dtype)


def _is_aligned(q: Tensor, *caches: Tensor) -> bool:
    """Return whether keys and values begin at multiples of 16 bytes, and queries can."""
    at = [q.shape[2], *(number for cache in caches for number in (*cache.stride()[:2], cache.data_ptr()))]
    return not any(number % 16 for number in at)


def _aligned(q: Tensor) -> Tensor:
    """Return queries with contiguous heads that begin at multiples of 16 bytes."""
    q = rows_of(q)
    return q if q.stride(0) % 16 == 0 and q.data_ptr() % 16 == 0 else q.clone(memory_format=torch.contiguous_format)


def _attend_many(call: _Call, out: Tensor, first_token: int) -> None:
    """Attend from the queries from `first_token` on."""
    out[first_token:].zero_()  # padding, of a size unknown here
    batch, few = call.batch, call.batch.num_decode
    sequences = batch.seqlens_k.numel() - few
    if not sequences:
        return
    chosen = _kernels().MANY[call.shape]
    rows = dict(chosen.constants)["M"]
    tiles = tile_count(len(out) - first_token, sequences, call.group_size, rows)
    arguments = call.arguments() | {
        "block_table": batch.block_table[few:],
        "cu_seqlens_q": batch.cu_seqlens_q[few:],
        "seqlens_k": batch.seqlens_k[few:],
        "out": out,
        "sinks": call.sinks,
        "num_sequences": sequences,
    }
    _kernels().paged_prefill.launch((tiles, call.key_cache.shape[2]), chosen, **arguments)


def _attend_few(call: _Call, out: Tensor) -> None:
    """Attend from the queries of the first `num_decode` sequences."""
    kernels, batch, few = _kernels(), call.batch, call.batch.num_decode
    chosen, adding = kernels.FEW[call.shape], kernels.SUMS[call.shape[1]]
    max_queries, heads, channels = max(batch.query_lengths[:few]), *call.q.shape[1:]
    tiles = -(-max_queries * call.group_size // kernels.ROWS_OF_SPLIT)
    spans = max(1, -(-batch.block_table.shape[1] * batch.block_size // kernels.SPAN))
    tokens = sum(batch.query_lengths[:few])
    sums = torch.empty(tokens, heads, spans, 2, dtype=torch.float32, device=out.device)
    parts = torch.empty(tokens, heads, spans, channels, dtype=torch.float32, device=out.device)
    lengths = {"cu_seqlens_q": batch.cu_seqlens_q, "seqlens_k": batch.seqlens_k, "sums": sums, "parts": parts}
    rows = few * tiles * call.key_cache.shape[2]
    grid = (few * tiles, call.key_cache.shape[2], min(spans, max(FEWEST_A_TILE, ENOUGH_PROGRAMS // rows)))
    kernels.paged_decode_split.launch(grid, chosen, **(call.arguments() | lengths), tiles=tiles, spans=spans)
    kernels.merge_splits.launch(
        (few * max_queries, heads),
        adding,
        **lengths,
        out=out,
        sinks=call.sinks,
        max_queries=max_queries,
        spans=spans,
        window=call.window,
        head_size=channels,
    )


BACKEND = reference.AttentionBackend(triton.NAME, triton.takes, paged_attention, has_windows=True)
