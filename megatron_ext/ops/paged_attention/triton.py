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
from megatron_ext.ops.backends import FunctionBackend, NoKernelError
from megatron_ext.ops.paged_attention.batch import PagedBatch
from megatron_ext.ops.triton.launching import own_rows, rows_of, tile_count

MAX_CHANNELS = 256
NO_WINDOW = 1 << 30  # tokens; more than any sequence has
ENOUGH_PROGRAMS, FEWEST_A_TILE = 1024, 4
"""Programs of a grid: enough for every multiprocessor to have several, or, with many rows, four for each tile of
decode rows. They take turns over the spans, since most requests are shorter than the block table is wide."""
FEW_TILES, FEW_ELEMENTS = 192, 192 * 64 * 128
"""Fewer tiles of prefill rows and KV heads, or elements of them, leave multiprocessors idle: their keys are split."""
PARTIAL_BYTES, FEWEST_SLOTS = 64 << 20, 32
"""Bytes for partial sums of decodes, or, with many rows, slots of each row. Spans beyond these are merged by groups."""


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

    def spans(self, span: int, queries: int, group: int = 1) -> int:
        """Return the spans that sequences of at most `queries` queries reach, beginning at a multiple of `group`."""
        width = self.batch.block_table.shape[1] * self.batch.block_size
        return max(1, min(-(-width // span), -(-(queries + self.window) // span) + group))

    def partial_sums(self, tiles: int, slots: int, rows: int) -> dict[str, Tensor | int]:
        """Return room for the partial sums of tiles of rows in each KV head, and its sizes."""
        shape = tiles, self.key_cache.shape[2], slots, rows
        return {
            "sums": torch.empty(*shape, 2, dtype=torch.float32, device=self.q.device),
            "parts": torch.empty(*shape, self.q.shape[2], dtype=torch.float32, device=self.q.device),
            "slots": slots,
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

    The first `num_decode` sequences, with few queries each, are computed by spans of 512 keys, every other sequence by
    tiles of queries and spans of 4,096. The choice depends on `num_decode` alone, and both kernels compute a query from
    its own keys alone, with the same bits however the spans are distributed among programs.
    """
    _require(q, key_cache, value_cache)
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


def _require(q: Tensor, key_cache: Tensor, value_cache: Tensor) -> None:
    """Raise `NoKernelError` unless a kernel supports these inputs."""
    if q.dtype != key_cache.dtype:
        raise NoKernelError(f"paged attention has no kernel for queries of {q.dtype} and keys of {key_cache.dtype}")
    if not own_rows(key_cache) or key_cache.stride() != value_cache.stride():
        raise NoKernelError("paged attention has no kernel for keys and values with different layouts")
    if q.shape[2] > MAX_CHANNELS:
        raise NoKernelError(
            f"paged attention has no kernel for heads of {q.shape[2]} channels, only for up to {MAX_CHANNELS}"
        )
    if not _is_aligned(q, key_cache, value_cache):
        sizes = f"heads of {q.shape[2]} channels and blocks {key_cache.stride(0)} elements apart"
        raise NoKernelError(f"paged attention has no kernel for {sizes}, only for multiples of 16")
    _kernels().paged_prefill.require(T=q.dtype)


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
    kernels, batch, few = _kernels(), call.batch, call.batch.num_decode
    tokens, sequences, heads = len(out) - first_token, batch.seqlens_k.numel() - few, call.key_cache.shape[2]
    if not sequences:
        return
    chosen = kernels.many(*call.shape, triton.architecture(call.q.device))
    tiles = tile_count(tokens, sequences, call.group_size, chosen["M"])
    spans = call.spans(chosen["SPAN"], tokens)
    few_tiles = min(FEW_TILES, FEW_ELEMENTS // (chosen["M"] * chosen["DP"]))
    slots = spans if spans > 1 and tiles * heads < few_tiles else 0
    arguments: dict[str, Tensor | int] = {
        "cu_seqlens_q": batch.cu_seqlens_q[few:],
        "seqlens_k": batch.seqlens_k[few:],
        "out": out,
        "sinks": call.sinks,
        "num_sequences": sequences,
        **call.partial_sums(tiles if slots else 0, slots, chosen["M"]),
    }
    turns = max(1, min(slots, ENOUGH_PROGRAMS // (tiles * heads)))
    first = call.arguments() | {"block_table": batch.block_table[few:]}
    kernels.paged_prefill.launch((tiles, heads, turns), chosen, **(first | arguments))
    if slots:
        sizes = {"max_queries": 0, "tiles": 0, "rows": chosen["M"]}
        _merge(call, (tokens + sequences, call.q.shape[1]), arguments | sizes, chosen["SPAN"], 1)


def _attend_few(call: _Call, out: Tensor) -> None:
    """Attend from the queries of the first `num_decode` sequences."""
    kernels, batch, few, heads = _kernels(), call.batch, call.batch.num_decode, call.key_cache.shape[2]
    chosen, lengths = kernels.FEW[call.shape], batch.query_lengths[:few]
    max_queries, group = max(lengths), chosen["GROUP"]
    tiles = -(-max_queries * call.group_size // chosen["M"])
    spans = call.spans(chosen["SPAN"], max_queries, group)
    rows = min(chosen["M"], max_queries * call.group_size)
    slot_bytes = few * tiles * heads * rows * (call.q.shape[2] + 2) * 4
    slots = min(spans, max(FEWEST_SLOTS, -(-spans // group), PARTIAL_BYTES // slot_bytes))
    arguments: dict[str, Tensor | int] = {
        "cu_seqlens_q": batch.cu_seqlens_q,
        "seqlens_k": batch.seqlens_k,
        "tiles": tiles,
        "rows": rows,
        **call.partial_sums(few * tiles, slots, rows),
    }
    turns = min(slots, max(FEWEST_A_TILE, ENOUGH_PROGRAMS // (few * tiles * heads)))
    grid = few * tiles, heads, turns
    kernels.paged_decode_split.launch(grid, chosen, **(call.arguments() | arguments))
    arguments |= {"out": out, "sinks": call.sinks, "num_sequences": few, "max_queries": max_queries}
    _merge(call, (few * max_queries, call.q.shape[1]), arguments, chosen["SPAN"], group)


def _merge(call: _Call, grid: tuple[int, int], arguments: dict[str, Tensor | int], span: int, group: int) -> None:
    """Merge partial sums into the output."""
    from megatron_ext.ops.paged_attention import kernels_merge

    sizes = {"span": span, "group": group, "window": call.window, "head_size": call.q.shape[2]}
    sizes["group_size"] = call.group_size
    kernels_merge.merge_splits.launch(grid, kernels_merge.SUMS[call.shape[1]], **arguments, **sizes)


BACKEND = FunctionBackend(triton.NAME, triton.takes, paged_attention)
