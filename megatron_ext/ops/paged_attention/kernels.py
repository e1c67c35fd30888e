"""Triton kernels of paged attention: few queries over many keys, and many queries.

A program computes attention for M rows of one sequence and one key head. Row i is query i // J and the i % J-th of the
J query heads that share the key head, so that keys are read once for all of them. Scores are base-2 exponents: the
scale includes log2(e). The place of each key is looked up: block_table[place // B], place % B. The keys of a row depend
on its own place alone: tiles of keys begin at multiples of N of the absolute position, and a tile without keys for a
row leaves its sums unchanged, to the bit.

Keys are summed by spans at multiples of SPAN of the absolute position, each from nothing, and merged as
`kernels_merge.py` says.

Letters: T tokens, S sequences, J query heads of a key head, D head size (padded to DP), B tokens in a block, M rows and
N keys of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_ext.ops.paged_attention.kernels_merge import (
    GROUP,
    TYPES,
    add_sink,
    merge,
    no_keys,
    spans_of_slots,
    store_sums,
)
from megatron_ext.ops.triton.device import find_piece, product
from megatron_ext.ops.triton.kernel_registry import MAX_REGISTERS, Config, config, kernel

SPAN = 512  # keys of a span of a decode: constant, so that its bits depend on its own keys only
PREFILL_SPAN = 4096  # keys of a span of a prefill
ROWS_OF_SPLIT = 16  # minimum rows of a matrix product
STAGES = 3  # with fewer, copies of a tile of keys are waited for before any product overlaps them
WIDE, NARROW = ("fp32",), ("bf16", "fp16")
Tiles = dict[tuple[tuple[str, ...], int], Config]
WARP_GROUPS = 90
"""Architecture that multiplies tiles of 64 rows and more by warp groups."""


def _many(
    types: tuple[str, ...], channels: int, rows: int, keys: int, warps: int, limit: int | None, *archs: int
) -> Config:
    return config(
        SPAN=PREFILL_SPAN,
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
    )


MANY: Tiles = {
    sizes[:2]: _many(*sizes)
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
    sizes[:2]: _many(*sizes, WARP_GROUPS)
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


FEW = {
    (types, channels): config(
        SPAN=SPAN,
        GROUP=GROUP,
        M=ROWS_OF_SPLIT,
        N=keys,
        DP=channels,
        FULL_FP32=int(types is WIDE),
        num_stages=STAGES,
        only=types,
        aligned=True,
        registers=limit,
    )
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
    q,
    first_query,
    first_row,
    rows,
    group_size,
    head,
    head_size,
    q_row,
    M: tl.constexpr,
    DP: tl.constexpr,
):
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
    out,
    sinks,
    first_query,
    first_row,
    is_row,
    group_size,
    head,
    head_size,
    greatest,
    total,
    weighted,
    M: tl.constexpr,
    DP: tl.constexpr,
):
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
    query,
    position,
    first,
    end,
    window,
    scale,
    keys_of_head,
    values_of_head,
    table,
    block_size,
    block_stride,
    token_stride,
    head_size,
    M: tl.constexpr,
    N: tl.constexpr,
    DP: tl.constexpr,
    FULL_FP32: tl.constexpr,
):
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
    strides="head_size q_row block_stride token_stride",
    counts="num_sequences slots group_size window block_size table_row",
    scalars="scale",
    types=TYPES,
    configs=(*MANY.values(), *MANY_BY_WARP_GROUPS.values()),
)
def paged_prefill(
    q,
    key_cache,
    value_cache,
    out,
    sinks,
    sums,
    parts,
    block_table,
    cu_seqlens_q,
    seqlens_k,
    num_sequences,
    slots,
    group_size,
    window,
    scale,
    block_size,
    head_size,
    table_row,
    q_row,
    block_stride,
    token_stride,
    SPAN: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    DP: tl.constexpr,
    FULL_FP32: tl.constexpr,
):
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
    strides="head_size q_row block_stride token_stride",
    counts="tiles rows slots group_size window block_size table_row",
    scalars="scale",
    types=TYPES,
    configs=tuple(FEW.values()),
)
def paged_decode_split(
    q,
    key_cache,
    value_cache,
    sums,
    parts,
    block_table,
    cu_seqlens_q,
    seqlens_k,
    tiles,
    rows,
    slots,
    group_size,
    window,
    scale,
    block_size,
    head_size,
    table_row,
    q_row,
    block_stride,
    token_stride,
    SPAN: tl.constexpr,
    GROUP: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    DP: tl.constexpr,
    FULL_FP32: tl.constexpr,
):
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
