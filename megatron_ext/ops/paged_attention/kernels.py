"""Triton kernels of paged attention: few queries over many keys, and many queries.

A program computes attention for M rows of one sequence and one key head. Row i is query i // J and the i % J-th of the
J query heads that share the key head, so that keys are read once for all of them. Scores are base-2 exponents: the
scale includes log2(e). The place of each key is looked up: block_table[place // B], place % B. The keys of a row depend
on its own place alone: tiles of keys begin at multiples of N of the absolute position, and a tile without keys for a
row leaves its sums unchanged, to the bit.

Letters: T tokens, S sequences, J query heads of a key head, D head size (padded to DP), B tokens in a block, M rows and
N keys of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_ext.ops.triton.device import find_piece, product
from megatron_ext.ops.triton.kernel_registry import FLOATS, MAX_REGISTERS, config, kernel

SPAN = 512  # keys of a partial sum of `paged_decode_split`: constant, so that a decode depends on its own keys only
ROWS_OF_SPLIT = 16  # minimum rows of a matrix product
WIDE, NARROW = ("fp32",), ("bf16", "fp16")
MANY = {
    (types, channels): config(
        M=rows,
        N=keys,
        DP=channels,
        FULL_FP32=int(types is WIDE),
        num_warps=warps,
        only=types,
        registers=limit,
        aligned=True,  # loading elements one by one takes too many registers
    )
    for types, channels, rows, keys, warps, limit in (
        (NARROW, 16, 64, 64, 4, None),
        (NARROW, 32, 64, 64, 4, MAX_REGISTERS),
        (NARROW, 64, 128, 64, 8, None),
        (NARROW, 128, 64, 32, 8, None),
        (NARROW, 256, 32, 32, 4, None),
        (WIDE, 16, 64, 32, 4, None),
        (WIDE, 32, 32, 32, 4, MAX_REGISTERS),
        (WIDE, 64, 32, 32, 8, MAX_REGISTERS),
        (WIDE, 128, 32, 32, 8, None),
        (WIDE, 256, 32, 16, 8, None),
    )
}
FEW = {
    (types, channels): config(
        SPAN=SPAN,
        M=ROWS_OF_SPLIT,
        N=keys,
        DP=channels,
        FULL_FP32=int(types is WIDE),
        only=types,
        aligned=True,
        registers=limit,
    )
    for types, channels, keys, limit in (
        (NARROW, 16, 32, None),
        (NARROW, 32, 64, None),
        (NARROW, 64, 64, None),
        (NARROW, 128, 64, None),
        (NARROW, 256, 32, None),
        (WIDE, 16, 32, None),
        (WIDE, 32, 32, None),
        (WIDE, 64, 32, MAX_REGISTERS),
        (WIDE, 128, 16, None),
        (WIDE, 256, 16, None),
    )
}
"""Configurations of both kernels, by types of the inputs and padded head size."""
SUMS = {channels: config(SPAN=SPAN, TILE=16, DP=channels, aligned=True) for channels in (16, 32, 64, 128, 256)}
TYPES = [{"T": name} for name in FLOATS]


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

    Returns the queries [M, DP], and for each row its token, its query head and whether it exists.
    """
    row = first_row + tl.arange(0, M)
    token = (first_query + row // group_size).to(tl.int64)
    query_head = head * group_size + row % group_size
    channel = tl.arange(0, DP)
    at = (token * q_row + query_head * head_size)[:, None] + channel[None, :]
    is_row = row < rows
    query = tl.load(q + at, mask=is_row[:, None] & (channel < head_size)[None, :], other=0.0)
    return query, token, query_head, is_row


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
    """
    channel = tl.arange(0, DP)
    greatest = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    weighted = tl.zeros([M, DP], tl.float32)
    for start in range(first, end, N):
        place = start + tl.arange(0, N)
        is_key = place < end
        block = tl.load(table + place // block_size, mask=is_key, other=0).to(tl.int64)
        at = (block * block_stride + (place % block_size) * token_stride)[:, None] + channel[None, :]
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


@triton.jit
def add_sink(greatest, total, weighted, sink):
    """Add a sink per row, a score (to base e) without a value, to an unnormalized softmax; -inf changes no bit.

    Returns the sum of the weights [M] and the weighted values [M, DP].
    """
    sink = sink * 1.4426950408889634  # log2(e)
    greater = tl.maximum(greatest, sink)
    base = tl.where(greater == float("-inf"), 0.0, greater)  # for rows without keys and sinks
    fade = tl.exp2(greatest - base)
    return total * fade + tl.exp2(sink - base), weighted * fade[:, None]


@kernel(
    pointers={
        "T": "q key_cache value_cache out",
        "fp32": "sinks",
        "i64": "block_table cu_seqlens_q seqlens_k",
    },
    strides="head_size q_row block_stride token_stride",
    counts="num_sequences group_size window block_size table_row",
    scalars="scale",
    types=TYPES,
    configs=tuple(MANY.values()),
)
def paged_prefill(
    q,
    key_cache,
    value_cache,
    out,
    sinks,
    block_table,
    cu_seqlens_q,
    seqlens_k,
    num_sequences,
    group_size,
    window,
    scale,
    block_size,
    head_size,
    table_row,
    q_row,
    block_stride,
    token_stride,
    M: tl.constexpr,
    N: tl.constexpr,
    DP: tl.constexpr,
    FULL_FP32: tl.constexpr,
):
    """Attend from a tile of rows to all keys in one program, for sequences with any number of queries.

    The grid is (tiles of pieces, key heads) with the pieces of `find_piece`; the last tiles, which have the most keys,
    start first. `group_size` is J; sinks [Hq], see `add_sink`.
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    sequence, first_row = find_piece(cu_seqlens_q, num_sequences, tile, group_size, M)
    first_query = tl.load(cu_seqlens_q + sequence)
    queries = (tl.load(cu_seqlens_q + sequence + 1) - first_query).to(tl.int32)
    if first_row < queries * group_size:
        before = tl.load(seqlens_k + sequence).to(tl.int32) - queries
        query, token, query_head, is_row = load_queries(
            q, first_query, first_row, queries * group_size, group_size, head, head_size, q_row, M, DP
        )
        position = before + (first_row + tl.arange(0, M)) // group_size
        end = before + tl.minimum((first_row + M - 1) // group_size + 1, queries)
        first = tl.maximum(before + first_row // group_size - window + 1, 0) // N * N
        keys, values = key_cache + head * head_size, value_cache + head * head_size
        table = block_table + sequence.to(tl.int64) * table_row
        where = (keys, values, table, block_size, block_stride, token_stride, head_size)
        greatest, total, weighted = attend_keys(query, position, first, end, window, scale, *where, M, N, DP, FULL_FP32)
        sink = tl.load(sinks + query_head, mask=is_row, other=float("-inf"))
        total, weighted = add_sink(greatest, total, weighted, sink)
        weighted = weighted / tl.where(is_row, total, 1.0)[:, None]
        channel = tl.arange(0, DP)
        query_heads = tl.num_programs(1) * group_size
        at = ((token * query_heads + query_head) * head_size)[:, None] + channel[None, :]
        is_real = is_row[:, None] & (channel < head_size)[None, :]
        tl.store(out + at, weighted.to(out.dtype.element_ty), mask=is_real)


@kernel(
    pointers={
        "T": "q key_cache value_cache",
        "fp32": "sums parts",
        "i64": "block_table cu_seqlens_q seqlens_k",
    },
    strides="head_size q_row block_stride token_stride",
    counts="tiles spans group_size window block_size table_row",
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
    spans,
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
    """Attend from a tile of decode rows to spans of SPAN keys, for `merge_splits` to merge.

    The grid is (S * tiles, key heads, programs that take turns over the spans), `tiles` being the tiles of the sequence
    with the most queries. Spans after a sequence's keys, or before its window, are not written. sums [T, Hq, spans, 2]
    fp32: maximum score, sum of weights; parts [T, Hq, spans, D] fp32.
    """
    sequence = tl.program_id(0) // tiles
    first_row = tl.program_id(0) % tiles * M
    head = tl.program_id(1)
    first_query = tl.load(cu_seqlens_q + sequence)
    queries = (tl.load(cu_seqlens_q + sequence + 1) - first_query).to(tl.int32)
    before = tl.load(seqlens_k + sequence).to(tl.int32) - queries
    first_key = tl.maximum(before - window + 1, 0) // N * N
    first_span = first_key // SPAN + tl.program_id(2)
    if (first_row < queries * group_size) & (first_span * SPAN < before + queries):
        query, token, query_head, is_row = load_queries(
            q, first_query, first_row, queries * group_size, group_size, head, head_size, q_row, M, DP
        )
        position = before + (first_row + tl.arange(0, M)) // group_size
        keys, values = key_cache + head * head_size, value_cache + head * head_size
        table = block_table + sequence.to(tl.int64) * table_row
        where = (keys, values, table, block_size, block_stride, token_stride, head_size)
        channel = tl.arange(0, DP)
        is_real = is_row[:, None] & (channel < head_size)[None, :]
        row = (token * (tl.num_programs(1) * group_size) + query_head) * spans
        for span in range(first_span, tl.cdiv(before + queries, SPAN), tl.num_programs(2)):
            first = tl.maximum(span * SPAN, first_key)
            end = tl.minimum(span * SPAN + SPAN, before + queries)
            greatest, total, weighted = attend_keys(
                query, position, first, end, window, scale, *where, M, N, DP, FULL_FP32
            )
            at = row + span
            tl.store(sums + at * 2, greatest, mask=is_row)
            tl.store(sums + at * 2 + 1, total, mask=is_row)
            tl.store(parts + at[:, None] * head_size + channel[None, :], weighted, mask=is_real)


@kernel(
    pointers={"T": "out", "fp32": "sums parts sinks", "i64": "cu_seqlens_q seqlens_k"},
    strides="head_size",
    counts="max_queries spans window",
    types=TYPES,
    configs=tuple(SUMS.values()),
)
def merge_splits(
    sums,
    parts,
    out,
    sinks,
    cu_seqlens_q,
    seqlens_k,
    max_queries,
    spans,
    window,
    head_size,
    SPAN: tl.constexpr,
    TILE: tl.constexpr,
    DP: tl.constexpr,
):
    """Merge the results of `paged_decode_split` into one softmax; the grid is (S * max_queries, query heads).

    Rows without keys are zeros.
    """
    sequence = tl.program_id(0) // max_queries
    query = tl.program_id(0) % max_queries
    first_query = tl.load(cu_seqlens_q + sequence)
    queries = (tl.load(cu_seqlens_q + sequence + 1) - first_query).to(tl.int32)
    if query < queries:
        keys = tl.load(seqlens_k + sequence).to(tl.int32)
        row = (first_query + query).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
        channel = tl.arange(0, DP)
        greatest = tl.full([1], float("-inf"), tl.float32)
        total = tl.zeros([1], tl.float32)
        weighted = tl.zeros([DP], tl.float32)
        first = tl.maximum(keys - queries - window + 1, 0) // SPAN
        for start in range(first // TILE * TILE, tl.cdiv(keys, SPAN), TILE):
            span = start + tl.arange(0, TILE)
            is_span = (span >= first) & (span * SPAN < keys)
            at = row * spans + span
            score = tl.load(sums + at * 2, mask=is_span, other=float("-inf"))
            greater = tl.maximum(greatest, tl.max(score, 0))
            base = tl.where(greater == float("-inf"), 0.0, greater)
            weights = tl.exp2(score - base)
            fade = tl.exp2(greatest - base)
            total = total * fade + tl.sum(weights * tl.load(sums + at * 2 + 1, mask=is_span, other=0.0), 0)
            is_real = is_span[:, None] & (channel < head_size)[None, :]
            part = tl.load(parts + at[:, None] * head_size + channel[None, :], mask=is_real, other=0.0)
            weighted = weighted * fade + tl.sum(part * weights[:, None], 0)
            greatest = greater
        total, row_of_values = add_sink(
            greatest, total, weighted[None, :], tl.load(sinks + tl.program_id(1) + tl.zeros([1], tl.int32))
        )
        weighted = tl.sum(row_of_values, 0) / tl.where(total == 0.0, 1.0, total)
        tl.store(out + row * head_size + channel, weighted.to(out.dtype.element_ty), mask=channel < head_size)
