"""Triton kernels of paged attention: few queries over many keys, and many queries.

A program computes attention for M rows of one sequence and one key head. Row i is query i // J and the i % J-th of the
J query heads that share the key head, so that keys are read once for all of them. Scores are base-2 exponents: the
scale includes log2(e). The place of each key is looked up: block_table[place // B], place % B. The keys of a row depend
on its own place alone: tiles of keys begin at multiples of N of the absolute position, and a tile without keys for a
row leaves its sums unchanged, to the bit.

Keys are summed by spans at multiples of SPAN of the absolute position, each from nothing, and merged as
`kernels_merge.py` says.

Grid sizes depend on shapes (rows and width of the block table, the token axis), not on lengths: a CUDA graph of one
step is right for every other step of the same shapes. Sequences without keys yield zeros.

Letters: T tokens, S sequences, J query heads of a key head, D head size (padded to DP), B tokens in a block, M rows and
N keys of a tile.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_ext.ops import triton as shared
from megatron_ext.ops.backends import NoKernelError
from megatron_ext.ops.paged_attention.batch import PagedBatch
from megatron_ext.ops.paged_attention.kernels_merge import (
    GROUP,
    SUMS,
    TYPES,
    add_sink,
    merge,
    merge_splits,
    no_keys,
    spans_of_slots,
    store_sums,
)
from megatron_ext.ops.triton.device import find_piece, product
from megatron_ext.ops.triton.kernel_registry import MAX_REGISTERS, Config, config, kernel
from megatron_ext.ops.triton.launching import own_rows, rows_of, tile_count

SPAN = 512  # keys of a span of a decode: constant, so that its bits depend on its own keys only
PREFILL_SPAN = 4096  # keys of a span of a prefill
ROWS_OF_SPLIT = 16  # minimum rows of a matrix product
STAGES = 3  # with fewer, copies of a tile of keys are waited for before any product overlaps them
WIDE, NARROW = ("fp32",), ("bf16", "fp16")
Tiles = dict[tuple[tuple[str, ...], int], Config]
WARP_GROUPS = 90
"""Architecture that multiplies tiles of 64 rows and more by warp groups."""


def _tiles(
    types: tuple[str, ...], channels: int, rows: int, keys: int, warps: int, limit: int | None, *archs: int, **more: int
) -> Config:
    return config(
        M=rows,
        N=keys,
        DP=channels,
        FULL_FP32=int(types is WIDE),
        num_warps=warps,
        num_stages=STAGES,
        only=types,
        registers=limit,
        aligned=True,  # loading elements one by one takes too many registers
        archs=archs,
        **more,
    )


MANY: Tiles = {
    sizes[:2]: _tiles(*sizes, SPAN=PREFILL_SPAN)
    for sizes in (
        (NARROW, 16, 64, 64, 4, None),
        (NARROW, 32, 64, 64, 4, MAX_REGISTERS),
        (NARROW, 64, 128, 32, 8, None, 80),
        (NARROW, 128, 64, 32, 8, None, 80),
        (NARROW, 256, 32, 32, 8, None, 80),
        (WIDE, 16, 64, 32, 4, None),
        (WIDE, 32, 32, 32, 4, MAX_REGISTERS),
        (WIDE, 64, 32, 32, 8, MAX_REGISTERS),
        (WIDE, 128, 32, 16, 8, MAX_REGISTERS),
        (WIDE, 256, 32, 16, 8, None),
    )
}
MANY_BY_WARP_GROUPS: Tiles = {
    sizes[:2]: _tiles(*sizes, WARP_GROUPS, SPAN=PREFILL_SPAN)
    for sizes in (
        (NARROW, 64, 128, 64, 8, None),
        (NARROW, 128, 128, 64, 8, None),
        (NARROW, 256, 64, 32, 8, None),
    )
}
"""Larger tiles than those of `MANY`, for warp groups: of 64 rows at least, and with 128 channels of 128, so that two
groups do not compute the same scores. On sm_80 they would spill."""


def many(types: tuple[str, ...], channels: int, arch: int) -> Config:
    """Return the configuration of `paged_prefill` on an architecture."""
    tiles = MANY | MANY_BY_WARP_GROUPS if arch == WARP_GROUPS else MANY
    return tiles[types, channels]


FEW: Tiles = {
    (types, channels): _tiles(types, channels, ROWS_OF_SPLIT, keys, 4, limit, SPAN=SPAN, GROUP=GROUP)
    for types, channels, keys, limit in (
        (NARROW, 16, 32, None),
        (NARROW, 32, 64, MAX_REGISTERS),
        (NARROW, 64, 64, MAX_REGISTERS),
        (NARROW, 128, 64, None),
        (NARROW, 256, 32, None),
        (WIDE, 16, 32, None),
        (WIDE, 32, 32, None),
        (WIDE, 64, 16, MAX_REGISTERS),
        (WIDE, 128, 16, None),
        (WIDE, 256, 16, None),
    )
}
"""Configurations of `paged_decode_split`, as `MANY` has them: by types of the inputs and padded head size."""


@triton.jit
def load_queries(
    q, first_query, first_row, rows, group_size, head, head_size, q_row,
    M: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Load M rows of a sequence whose first query is token `first_query` and that has `rows` rows.

    Returns the queries [M, DP], and for each row whether it exists.
    """
    row = first_row + tl.arange(0, M)
    token = (first_query + row // group_size).to(tl.int64)
    query_head = head * group_size + row % group_size
    channel = tl.arange(0, DP)
    at = (token * q_row + query_head * head_size)[:, None] + channel[None, :]
    is_row = row < rows
    query = tl.load(q + at, mask=is_row[:, None] & (channel < head_size)[None, :], other=0.0)
    return query, is_row


@triton.jit
def store_rows(
    out, sinks, first_query, first_row, is_row, group_size, head, head_size, greatest, total, weighted,
    M: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Add the sinks to an unnormalized softmax and store its M rows, of a tile as in `load_queries`."""
    row = first_row + tl.arange(0, M)
    query_head = head * group_size + row % group_size
    sink = tl.load(sinks + query_head, mask=is_row, other=float("-inf"))
    total, weighted = add_sink(greatest, total, weighted, sink)
    weighted = weighted / tl.where(is_row, total, 1.0)[:, None]
    channel, head_size = tl.arange(0, DP), head_size.to(tl.int32)
    row_size = tl.num_programs(1) * group_size * head_size
    first = out + (first_query + first_row // group_size).to(tl.int64) * row_size
    at = (row // group_size - first_row // group_size) * row_size + query_head * head_size
    is_real = is_row[:, None] & (channel < head_size)[None, :]
    tl.store(first + (at[:, None] + channel[None, :]), weighted.to(out.dtype.element_ty), mask=is_real)


@triton.jit
def attend_keys(
    query, position, first, end, window, scale, keys_of_head, values_of_head, table, block_size, block_stride,
    token_stride, head_size,
    M: tl.constexpr, N: tl.constexpr, DP: tl.constexpr, FULL_FP32: tl.constexpr,
):  # fmt: skip
    """Compute the unnormalized softmax of queries [M, DP] at their positions over the keys [first, end).

    Returns the maximum score of each row, the sum of its weights relative to that, and the weighted values [M, DP].
    Block numbers are loaded a tile ahead: copies that depend on a load of the same trip would not be pipelined.
    """
    channel, head_size = tl.arange(0, DP), head_size.to(tl.int32)
    greatest = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    weighted = tl.zeros([M, DP], tl.float32)
    place = first + tl.arange(0, N)
    following = tl.load(table + place // block_size, mask=place < end, other=0)
    for start in range(first, end, N):
        place = start + tl.arange(0, N)
        is_key = place < end
        block = following.to(tl.int64)
        following = tl.load(table + (place + N) // block_size, mask=place + N < end, other=0)
        in_block = (place % block_size) * token_stride.to(tl.int32)  # a block of a layer is small
        at = (block * block_stride + in_block)[:, None] + channel[None, :]
        is_real = is_key[:, None] & (channel < head_size)[None, :]
        keys = tl.load(keys_of_head + at, mask=is_real, other=0.0)
        scores = product(query, tl.trans(keys), FULL_FP32) * scale
        behind = position[:, None] - place[None, :]
        scores = tl.where(is_key[None, :] & (behind >= 0) & (behind < window), scores, float("-inf"))
        greater = tl.maximum(greatest, tl.max(scores, 1))
        base = tl.where(greater == float("-inf"), 0.0, greater)  # for rows that have seen no key so far
        weights = tl.exp2(scores - base[:, None])
        fade = tl.exp2(greatest - base)
        values = tl.load(values_of_head + at, mask=is_real, other=0.0)
        weighted = weighted * fade[:, None] + product(weights.to(values.dtype), values, FULL_FP32)
        total = total * fade + tl.sum(weights, 1)
        greatest = greater
    return greatest, total, weighted


@kernel(
    pointers={
        "T": "q key_cache value_cache out",
        "fp32": "sinks sums parts",
        "i32": "block_table",
        "i64": "cu_seqlens_q seqlens_k",
    },
    views="block_table",
    counts="num_sequences slots group_size window block_size table_row",
    scalars="scale",
    types=TYPES,
    configs=(*MANY.values(), *MANY_BY_WARP_GROUPS.values()),
)
def paged_prefill(
    q, key_cache, value_cache, out, sinks, sums, parts, block_table, cu_seqlens_q, seqlens_k, num_sequences, slots,
    group_size, window, scale, block_size, head_size, table_row, q_row, block_stride, token_stride,
    SPAN: tl.constexpr, M: tl.constexpr, N: tl.constexpr, DP: tl.constexpr, FULL_FP32: tl.constexpr,
):  # fmt: skip
    """Attend from a tile of rows to their keys, for sequences with any number of queries.

    The grid is (tiles of pieces, key heads, programs that take turns over the spans) with the pieces of `find_piece`;
    the last tiles, which have the most keys, start first. `slots` is 0, and the one program of a tile computes `out`;
    or `merge_splits` does so from the partial sums of the tile, a slot for each span: sums [tiles, Hkv, slots, M, 2]
    and parts [tiles, Hkv, slots, M, D], both fp32. `group_size` is J; sinks [Hq], see `add_sink`.
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    sequence, first_row = find_piece(cu_seqlens_q, num_sequences, tile, group_size, M)
    first_query = tl.load(cu_seqlens_q + sequence)
    queries = (tl.load(cu_seqlens_q + sequence + 1) - first_query).to(tl.int32)
    if first_row < queries * group_size:
        before = tl.load(seqlens_k + sequence).to(tl.int32) - queries
        query, is_row = load_queries(
            q, first_query, first_row, queries * group_size, group_size, head, head_size, q_row, M, DP
        )
        position = before + (first_row + tl.arange(0, M)) // group_size
        end = before + tl.minimum((first_row + M - 1) // group_size + 1, queries)
        first = tl.maximum(before + first_row // group_size - window + 1, 0) // N * N
        keys, values = key_cache + head * head_size, value_cache + head * head_size
        table = block_table + sequence.to(tl.int64) * table_row
        where = (keys, values, table, block_size, block_stride, token_stride, head_size)
        origin = spans_of_slots(before, before + queries, slots, window, SPAN, 1)[0]
        partial = (tile * tl.num_programs(1) + head).to(tl.int64) * slots
        spans = tl.cdiv(end, SPAN)
        run = tl.where(slots > 0, 1, spans)  # spans that the program merges
        for start in range(first // SPAN + tl.program_id(2) * run, spans, tl.num_programs(2) * run):
            greatest, total, weighted = no_keys(M, DP)
            for span in range(start, tl.minimum(start + run, spans)):
                begin, stop = tl.maximum(span * SPAN, first), tl.minimum(span * SPAN + SPAN, end)
                of_span = attend_keys(query, position, begin, stop, window, scale, *where, M, N, DP, FULL_FP32)
                greatest, total, weighted = merge(greatest, total, weighted, *of_span)
            if slots > 0:
                at = (partial + start - origin) * M
                store_sums(sums, parts, at, is_row, head_size, greatest, total, weighted, M, DP)
            else:
                rows = (first_query, first_row, is_row, group_size, head, head_size)
                store_rows(out, sinks, *rows, greatest, total, weighted, M, DP)


@kernel(
    pointers={
        "T": "q key_cache value_cache",
        "fp32": "sums parts",
        "i32": "block_table",
        "i64": "cu_seqlens_q seqlens_k",
    },
    views="block_table",
    counts="tiles rows slots group_size window block_size table_row",
    scalars="scale",
    types=TYPES,
    configs=tuple(FEW.values()),
)
def paged_decode_split(
    q, key_cache, value_cache, sums, parts, block_table, cu_seqlens_q, seqlens_k, tiles, rows, slots, group_size,
    window, scale, block_size, head_size, table_row, q_row, block_stride, token_stride,
    SPAN: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, DP: tl.constexpr,
    FULL_FP32: tl.constexpr,
):  # fmt: skip
    """Attend from a tile of decode rows to spans of SPAN keys, for `merge_splits` to merge.

    The grid is (S * tiles, key heads, programs that take turns over the slots), `tiles` being the tiles of the sequence
    with the most queries, and `rows` the rows of the largest tile. Slots have the spans of `spans_of_slots`; those
    without keys are not written. sums [S * tiles, Hkv, slots, rows, 2] fp32: maximum score, sum of weights; parts [S *
    tiles, Hkv, slots, rows, D] fp32.
    """
    sequence = tl.program_id(0) // tiles
    first_row = tl.program_id(0) % tiles * M
    head = tl.program_id(1)
    first_query = tl.load(cu_seqlens_q + sequence)
    queries = (tl.load(cu_seqlens_q + sequence + 1) - first_query).to(tl.int32)
    before = tl.load(seqlens_k + sequence).to(tl.int32) - queries
    first_key = tl.maximum(before - window + 1, 0) // N * N
    origin, run = spans_of_slots(before, before + queries, slots, window, SPAN, GROUP)
    spans = tl.cdiv(before + queries, SPAN)
    first_slot = (first_key // SPAN - origin) // run + tl.program_id(2)
    if (first_row < queries * group_size) & (origin + first_slot * run < spans):
        query, is_row = load_queries(
            q, first_query, first_row, queries * group_size, group_size, head, head_size, q_row, M, DP
        )
        position = before + (first_row + tl.arange(0, M)) // group_size
        keys, values = key_cache + head * head_size, value_cache + head * head_size
        table = block_table + sequence.to(tl.int64) * table_row
        where = (keys, values, table, block_size, block_stride, token_stride, head_size)
        partial = (tl.program_id(0) * tl.num_programs(1) + head).to(tl.int64) * slots
        for slot in range(first_slot, tl.cdiv(spans - origin, run), tl.num_programs(2)):
            first_span = origin + slot * run
            greatest, total, weighted = no_keys(M, DP)
            for span in range(tl.maximum(first_span, first_key // SPAN), tl.minimum(first_span + run, spans)):
                first = tl.maximum(span * SPAN, first_key)
                end = tl.minimum(span * SPAN + SPAN, before + queries)
                of_span = attend_keys(query, position, first, end, window, scale, *where, M, N, DP, FULL_FP32)
                greatest, total, weighted = merge(greatest, total, weighted, *of_span)
            store_sums(sums, parts, (partial + slot) * rows, is_row, head_size, greatest, total, weighted, M, DP)


MAX_CHANNELS = 256
NO_WINDOW = 1 << 30  # tokens; more than any sequence has
ENOUGH_PROGRAMS, FEWEST_A_TILE = 1024, 4
"""Programs of a grid: enough for every multiprocessor to have several, or, with many rows, four for each tile of
decode rows. They take turns over the spans, since most requests are shorter than the block table is wide."""
FEW_TILES, FEW_ELEMENTS = 192, 192 * 64 * 128
"""Fewer tiles of prefill rows and KV heads, or elements of them, leave multiprocessors idle: their keys are split."""
PARTIAL_BYTES, FEWEST_SLOTS = 64 << 20, 32
"""Bytes for partial sums of decodes, or, with many rows, slots of each row. Spans beyond these are merged by groups."""


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
        types = WIDE if self.q.dtype == torch.float32 else NARROW
        return types, shared.padded(self.q.shape[2])

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


def launch_paged_attention(
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
    paged_prefill.require(T=q.dtype)


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
    tokens, sequences, heads = len(out) - first_token, batch.seqlens_k.numel() - few, call.key_cache.shape[2]
    if not sequences:
        return
    chosen = many(*call.shape, shared.architecture(call.q.device))
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
    paged_prefill.launch((tiles, heads, turns), chosen, **(first | arguments))
    if slots:
        sizes: dict[str, Tensor | int] = {"max_queries": 0, "tiles": 0, "rows": chosen["M"]}
        _merge(call, (tokens + sequences, call.q.shape[1]), arguments | sizes, chosen["SPAN"], 1)


def _attend_few(call: _Call, out: Tensor) -> None:
    """Attend from the queries of the first `num_decode` sequences."""
    batch, few, heads = call.batch, call.batch.num_decode, call.key_cache.shape[2]
    chosen, lengths = FEW[call.shape], batch.query_lengths[:few]
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
    paged_decode_split.launch(grid, chosen, **(call.arguments() | arguments))
    arguments |= {"out": out, "sinks": call.sinks, "num_sequences": few, "max_queries": max_queries}
    _merge(call, (few * max_queries, call.q.shape[1]), arguments, chosen["SPAN"], group)


def _merge(call: _Call, grid: tuple[int, int], arguments: dict[str, Tensor | int], span: int, group: int) -> None:
    """Merge partial sums into the output."""
    sizes = {"span": span, "group": group, "window": call.window, "head_size": call.q.shape[2]}
    sizes["group_size"] = call.group_size
    merge_splits.launch(grid, SUMS[call.shape[1]], **arguments, **sizes)
