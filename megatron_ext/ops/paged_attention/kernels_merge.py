"""Triton kernel that merges partial sums of attention, and the functions by which attention's kernels merge their own.

Spans are merged in their order: a prefill's one by one, a decode's by groups of GROUP spans, then the groups. Merging
is the same to the bit in the program that has computed several spans and in `merge_splits`, so a launch may choose by
what fills the device and by the memory for partial sums.

Letters: M rows of a tile, T tokens, S sequences, D head size (padded to DP).
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_ext.ops.triton.device import INTERPRETED, find_piece
from megatron_ext.ops.triton.kernel_registry import FLOATS, config, kernel

GROUP = 16
"""Spans of a group of a decode: constant, so that its bits depend on its own keys only."""
SUMS = {channels: config(TILE=GROUP, DP=channels, aligned=True) for channels in (16, 32, 64, 128, 256)}
TYPES = [{"T": name} for name in FLOATS]


@triton.jit
def no_keys(M: tl.constexpr, DP: tl.constexpr):
    """Return the unnormalized softmax of M rows over no keys: maximum scores, sums of weights, weighted values."""
    return tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32), tl.zeros([M, DP], tl.float32)


@triton.jit
def merge(greatest, total, weighted, next_greatest, next_total, next_weighted):
    """Merge two unnormalized softmaxes of the same rows; one over no keys changes no bit of the other.

    Products and sums are written as fused ones, so that every kernel rounds them alike.
    """
    greater = tl.maximum(greatest, next_greatest)
    base = tl.where(greater == float("-inf"), 0.0, greater)
    fade, weight = tl.exp2(greatest - base), tl.exp2(next_greatest - base)
    total = tl.fma(total, fade, next_total * weight)
    weighted = tl.fma(weighted, tl.broadcast_to(fade[:, None], weighted.shape), next_weighted * weight[:, None])
    return greater, total, weighted


@triton.jit
def store_sums(sums, parts, at, is_row, head_size, greatest, total, weighted, M: tl.constexpr, DP: tl.constexpr):
    """Store the unnormalized softmax of M rows as the partial sums from number `at` on."""
    row, channel, head_size = tl.arange(0, M), tl.arange(0, DP), head_size.to(tl.int32)
    tl.store(sums + at * 2 + row * 2, greatest, mask=is_row)
    tl.store(sums + at * 2 + row * 2 + 1, total, mask=is_row)
    is_real = is_row[:, None] & (channel < head_size)[None, :]
    tl.store(parts + at * head_size + (row[:, None] * head_size + channel[None, :]), weighted, mask=is_real)


@triton.jit
def add_sink(greatest, total, weighted, sink):
    """Add a sink per row, a score (to base e) without a value, to an unnormalized softmax; -inf changes no bit.

    Returns the sum of the weights [M] and the weighted values [M, DP].
    """
    sink = sink * 1.4426950408889634  # log2(e)
    greater = tl.maximum(greatest, sink)
    base = tl.where(greater == float("-inf"), 0.0, greater)  # for rows without keys and sinks
    fade = tl.exp2(greatest - base)
    return tl.fma(total, fade, tl.exp2(sink - base)), weighted * fade[:, None]


@triton.jit
def spans_of_slots(before, keys, slots, window, SPAN, GROUP):
    """Return the span at which a sequence's slots begin, a multiple of GROUP, and the spans of each slot: 1 or GROUP.

    `before` is the position of the first query, `keys` counts all keys. A sequence with more spans than there are slots
    has a group of them in each.
    """
    origin = tl.maximum(before - window + 1, 0) // SPAN // GROUP * GROUP
    return origin, tl.where(tl.cdiv(keys, SPAN) - origin > slots, GROUP, 1)


@kernel(
    pointers={"T": "out", "fp32": "sums parts sinks", "i64": "cu_seqlens_q seqlens_k"},
    counts="num_sequences max_queries tiles rows slots group_size window span group",
    types=TYPES,
    configs=tuple(SUMS.values()),
)
def merge_splits(
    sums, parts, out, sinks, cu_seqlens_q, seqlens_k, num_sequences, max_queries, tiles, rows, slots, group_size,
    window, span, group, head_size,
    TILE: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Merge the partial sums of `paged_decode_split` or `paged_prefill` into one softmax.

    The grid is (S * max_queries, query heads) after decodes, with `tiles` tiles of a sequence; with `max_queries` 0 it
    is (T + S, query heads), and tiles are numbered as in `find_piece`. Tiles have `rows` rows; `span` is their SPAN,
    `group` the GROUP: TILE, or 1. Rows without keys are zeros.
    """
    if max_queries > 0:
        sequence = tl.program_id(0) // max_queries
        query = tl.program_id(0) % max_queries
        first_tile = sequence * tiles
    else:
        sequence, query = find_piece(cu_seqlens_q, num_sequences, tl.program_id(0), 1, 1)
        before = tl.load(cu_seqlens_q + sequence) - tl.load(cu_seqlens_q)
        first_tile = before.to(tl.int32) * group_size // rows + sequence
    first_query = tl.load(cu_seqlens_q + sequence)
    queries = (tl.load(cu_seqlens_q + sequence + 1) - first_query).to(tl.int32)
    if query < queries:
        keys = tl.load(seqlens_k + sequence).to(tl.int32)
        position = keys - queries + query
        first_span, run = spans_of_slots(keys - queries, keys, slots, window, span, group)
        low = (tl.maximum(position - window + 1, 0) // span - first_span) // run
        high = tl.where(position < 0, low, (position // span - first_span) // run + 1)
        by_group = run < group
        head = tl.program_id(1)
        row = query * group_size + head % group_size
        tile = (first_tile + row // rows) * (tl.num_programs(1) // group_size) + head // group_size
        channel = tl.arange(0, DP)
        is_channel = channel < head_size
        greatest, total, weighted = no_keys(1, DP)
        for start in range(low // TILE * TILE, high, TILE):
            before_them = greatest, total, weighted
            if by_group:
                greatest, total, weighted = no_keys(1, DP)
            for i in tl.static_range(TILE):  # unrolled, so that all loads are issued at once
                if (start + i < high) if INTERPRETED else True:
                    slot = start + i + tl.zeros([1], tl.int32)
                    is_slot = (slot >= low) & (slot < high)
                    at = (tile.to(tl.int64) * slots + slot) * rows + row % rows
                    score = tl.load(sums + at * 2, mask=is_slot, other=float("-inf"))
                    of_slot = tl.load(sums + at * 2 + 1, mask=is_slot, other=0.0)
                    is_real = is_slot[:, None] & is_channel[None, :]
                    part = tl.load(parts + at[:, None] * head_size + channel[None, :], mask=is_real, other=0.0)
                    greatest, total, weighted = merge(greatest, total, weighted, score, of_slot, part)
            if by_group:
                greatest, total, weighted = merge(*before_them, greatest, total, weighted)
        total, weighted = add_sink(greatest, total, weighted, tl.load(sinks + head + tl.zeros([1], tl.int32)))
        weighted = tl.sum(weighted / tl.where(total == 0.0, 1.0, total)[:, None], 0)
        place = ((first_query + query).to(tl.int64) * tl.num_programs(1) + head) * head_size
        tl.store(out + place + channel, weighted.to(out.dtype.element_ty), mask=is_channel)
