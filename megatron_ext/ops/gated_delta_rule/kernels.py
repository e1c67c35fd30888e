"""The gated delta rule on a CUDA device: prefill in tiles of tokens, and one token of each request.

Formulas and letters are those of `reference.py`, a tile being its chunk. What needs no state is computed for all tiles
at once (`delta_tiles`); then a program has some value channels V of one head of one sequence, whose state stays in
registers from the sequence's first token of the step to its last (`delta_prefill`). Tiles begin at the sequence's first
token of the step. Where states are kept on the way is nothing to them: outputs do not depend on it, and where a
sequence is cut at multiples of TILE neither do they, nor the states, to the bit.

Sums of log decays are fp64 and split in two fp32 numbers before differences are taken: of fast decay they reach
thousands. (I + L) is inverted by blocks, which is stable where powers of L are not. Products are of fp32 numbers: with
fp32 inputs in full, with those of 16 bits on tensor cores, nearly fp32's (tf32x3) for what states are made of and in
tf32 for outputs.
"""

import triton
import triton.language as tl

from megatron_ext.ops.triton.device import find_piece, next_kept, store_kept
from megatron_ext.ops.triton.registry import FLOATS, MOST_REGISTERS, STATE_TYPES, config, kernel

MOST_ODD_KEYS = 64  # of more, elements that are loaded one by one take more registers than there are
WIDE, NARROW = FLOATS[:1], FLOATS[1:]
TILES = {WIDE: 16, NARROW: 32}  # tokens; products in full fp32 have no registers for more
NORM_EPSILON = tl.constexpr(1e-6)  # that of `reference.py`
INPUTS = [{"T": inputs} for inputs in FLOATS]


@triton.jit
def load_keys(keys, row, row_stride, group, key_dim, is_token, K: tl.constexpr):
    """Keys, or queries, of the tokens `row` in fp32: [tokens, K]; zero where there are none."""
    channel = tl.arange(0, K)
    at = row[:, None] * row_stride + (group * key_dim + channel)[None, :]
    return tl.load(keys + at, mask=is_token[:, None] & (channel < key_dim)[None, :], other=0.0).to(tl.float32)


@triton.jit
def load_elapsed(g, row, g_row, head, is_token):
    """Logarithm of the decay from the tile's start to behind each token, fp64 [tokens]; constant behind the end."""
    return tl.cumsum(tl.load(g + row * g_row + head, mask=is_token, other=0.0).to(tl.float64), 0)


@triton.jit
def invert(lower, TILE: tl.constexpr):
    """The inverse of I + `lower` [TILE, TILE], which is zero on the diagonal and above it.

    By blocks of twice the size each time: that of [[A, 0], [C, B]] is [[A^-1, 0], [-B^-1 C A^-1, B^-1]].
    """
    place = tl.arange(0, TILE)
    inverse = tl.where(place[:, None] == place[None, :], 1.0, 0.0)
    size = 1
    while size < TILE:
        block = place // size
        is_c = (block[:, None] % 2 == 1) & (block[None, :] == block[:, None] - 1)
        times = tl.dot(inverse, tl.where(is_c, lower, 0.0), input_precision="tf32x3")
        inverse -= tl.dot(times, inverse, input_precision="tf32x3")
        size *= 2
    return inverse


@kernel(
    pointers={"T": "q k", "fp32": "g beta solved mixed key_lengths query_lengths", "i64": "cu_seqlens"},
    strides="q_row k_row g_row beta_row key_dim",
    counts="sequences heads heads_per_group normalize",
    scalars="scale",
    types=INPUTS,
    configs=[config(TILE=tile, CHANNELS=16, only=types, registers=MOST_REGISTERS) for types, tile in TILES.items()],
)
def delta_tiles(
    q, k, g, beta, solved, mixed, key_lengths, query_lengths, cu_seqlens, q_row, k_row, g_row, beta_row, key_dim,
    sequences, heads, heads_per_group, normalize, scale,
    TILE: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Of a tile of one head: (I + L)^-1 diag(beta), and what each token's output takes of what each token writes.

    The grid is (tiles of `find_piece`, heads); solved and mixed are [T, H, TILE], a row for each token. Of its keys and
    queries [T, H] says what they are multiplied with before anything else; the scale is in that of queries.
    """
    PRECISION: tl.constexpr = "ieee" if q.dtype.element_ty == tl.float32 else "tf32"
    sequence, first = find_piece(cu_seqlens, sequences, tl.program_id(0), 1, TILE)
    start = tl.load(cu_seqlens + sequence) + first
    end = tl.load(cu_seqlens + sequence + 1)
    head = tl.program_id(1)
    if start < end:
        place = tl.arange(0, TILE)
        row = start + place
        is_token = row < end
        between_keys = tl.zeros([TILE, TILE], tl.float32)
        to_queries = tl.zeros([TILE, TILE], tl.float32)
        key_squares, query_squares = tl.zeros([TILE], tl.float32), tl.zeros([TILE], tl.float32)
        for first_channel in range(0, key_dim, CHANNELS):
            channel = first_channel + tl.arange(0, CHANNELS)
            column = (head // heads_per_group * key_dim + channel)[None, :]
            is_real = is_token[:, None] & (channel < key_dim)[None, :]
            keys = tl.load(k + row[:, None] * k_row + column, mask=is_real, other=0.0).to(tl.float32)
            queries = tl.load(q + row[:, None] * q_row + column, mask=is_real, other=0.0).to(tl.float32)
            key_squares += tl.sum(keys * keys, 1)
            query_squares += tl.sum(queries * queries, 1)
            between_keys += tl.dot(keys, tl.trans(keys), input_precision="tf32x3")
            to_queries += tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        key_length = tl.where(normalize != 0, tl.rsqrt(key_squares + NORM_EPSILON), 1.0)
        query_length = tl.where(normalize != 0, tl.rsqrt(query_squares + NORM_EPSILON), 1.0) * scale
        strength = tl.load(beta + row * beta_row + head, mask=is_token, other=0.0)
        elapsed = load_elapsed(g, row, g_row, head, is_token)
        high = elapsed.to(tl.float32)
        low = (elapsed - high.to(tl.float64)).to(tl.float32)
        gap = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
        is_past = place[:, None] >= place[None, :]
        decay = tl.where(is_past, tl.exp(tl.minimum(gap, 0.0)), 0.0)
        recalled = between_keys * key_length[:, None] * key_length[None, :] * decay * strength[:, None]
        inverse = invert(tl.where(place[:, None] > place[None, :], recalled, 0.0), TILE)
        weights = to_queries * query_length[:, None] * key_length[None, :] * decay
        token = row * heads + head
        at = token[:, None] * TILE + place[None, :]
        tl.store(solved + at, inverse * strength[None, :], mask=is_token[:, None])
        tl.store(mixed + at, weights, mask=is_token[:, None])
        tl.store(key_lengths + token, key_length, mask=is_token)
        tl.store(query_lengths + token, query_length, mask=is_token)


@triton.jit
def fading(elapsed, count, lengths, TILE: tl.constexpr):
    """How the state fades over a tile's first `count` tokens, and what keys are multiplied with for behind them."""
    place = tl.arange(0, TILE)
    until = tl.sum(tl.where(place == count - 1, elapsed, 0.0), 0)
    return tl.exp(until.to(tl.float32)), tl.where(
        place < count, tl.exp((until - elapsed).to(tl.float32)), 0.0
    ) * lengths


@kernel(
    pointers={
        "T": "q k v y",
        "fp32": "g solved mixed key_lengths query_lengths",
        "S": "live snapshots",
        "i64": "cu_seqlens slots kept_slots kept_sequences kept_tokens",
        "i1": "has_initial",
    },
    strides="q_row k_row v_row g_row live_row snapshot_row key_dim value_dim",
    counts="kept heads heads_per_group",
    types=STATE_TYPES,
    configs=[
        config(
            TILE=tile,
            K=keys,
            V=16,
            num_warps=warps,
            only=types,
            registers=MOST_REGISTERS,
            aligned=keys > MOST_ODD_KEYS,
        )
        for types, tile in TILES.items()
        for keys, warps in ((16, 4), (32, 4), (64, 8 if types == WIDE else 4), (128, 8))
    ],
)
def delta_prefill(
    q, k, v, g, solved, mixed, key_lengths, query_lengths, y, live, snapshots, cu_seqlens, slots, kept_slots,
    kept_sequences, kept_tokens, has_initial, q_row, k_row, v_row, g_row, live_row, snapshot_row, key_dim, value_dim,
    kept, heads, heads_per_group,
    TILE: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """A sequence's tokens of one head: outputs, states that are to be kept, and the last one, in place."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + sequence)
    begin, end = tl.load(cu_seqlens + sequence).to(tl.int32), tl.load(cu_seqlens + sequence + 1).to(tl.int32)
    if (slot >= 0) & (begin < end):
        PRECISE: tl.constexpr = "ieee" if q.dtype.element_ty == tl.float32 else "tf32x3"
        PRECISION: tl.constexpr = "ieee" if q.dtype.element_ty == tl.float32 else "tf32"
        value, key, place = tl.program_id(2) * V + tl.arange(0, V), tl.arange(0, K), tl.arange(0, TILE)
        is_value = (value < value_dim)[None, :]
        is_state = (key < key_dim)[:, None] & is_value
        cell = (head * key_dim + key)[:, None] * value_dim + value[None, :]
        has_state = tl.load(has_initial + sequence).to(tl.int1)
        state = tl.load(live + slot * live_row + cell, mask=is_state & has_state, other=0.0).to(tl.float32)
        group = head // heads_per_group
        stop = next_kept(kept_sequences, kept_tokens, kept, sequence, begin)
        for start in range(begin, end, TILE):
            row, is_token = (start + place).to(tl.int64), start + place < end
            token = row * heads + head
            tile, is_output = token[:, None] * TILE + place[None, :], is_token[:, None] & is_value
            elapsed = load_elapsed(g, row, g_row, head, is_token)
            decay = tl.exp(elapsed.to(tl.float32))
            key_length = tl.load(key_lengths + token, mask=is_token, other=0.0)
            keys = load_keys(k, row, k_row, group, key_dim, is_token, K)
            read = tl.dot(keys, state, input_precision=PRECISE) * (decay * key_length)[:, None]
            column = (head * value_dim + value)[None, :]
            values = tl.load(v + row[:, None] * v_row + column, mask=is_output, other=0.0).to(tl.float32)
            inverse = tl.load(solved + tile, mask=is_token[:, None], other=0.0)
            written = tl.dot(inverse, values - read, input_precision=PRECISE)
            queries = load_keys(q, row, q_row, group, key_dim, is_token, K)
            query_length = tl.load(query_lengths + token, mask=is_token, other=0.0)
            outputs = tl.dot(queries, state, input_precision=PRECISION) * (decay * query_length)[:, None]
            weights = tl.load(mixed + tile, mask=is_token[:, None], other=0.0)
            outputs += tl.dot(weights, written, input_precision=PRECISION)
            tl.store(y + token[:, None] * value_dim + value[None, :], outputs.to(y.dtype.element_ty), mask=is_output)
            while stop <= start + TILE:
                fade, lasting = fading(elapsed, stop - start, key_length, TILE)
                there = state * fade + tl.dot(tl.trans(keys * lasting[:, None]), written, input_precision=PRECISE)
                store_kept(
                    snapshots, snapshot_row, there, cell, is_state,
                    kept_slots, kept_sequences, kept_tokens, kept, sequence, stop,
                )  # fmt: skip
                stop = next_kept(kept_sequences, kept_tokens, kept, sequence, stop)
            fade, lasting = fading(elapsed, TILE, key_length, TILE)
            state = state * fade + tl.dot(tl.trans(keys * lasting[:, None]), written, input_precision=PRECISE)
        tl.store(live + slot * live_row + cell, state.to(live.dtype.element_ty), mask=is_state)


@kernel(
    pointers={"T": "q k v y", "fp32": "g beta", "S": "live", "i64": "slots"},
    strides="q_row k_row v_row g_row beta_row live_row key_dim value_dim",
    counts="heads heads_per_group normalize",
    scalars="scale",
    types=STATE_TYPES,
    configs=[
        config(K=16, V=32),
        config(K=32, V=32),
        config(K=64, V=32),
        config(K=128, V=16),
    ],
)
def delta_decode(
    q, k, v, g, beta, y, live, slots, q_row, k_row, v_row, g_row, beta_row, live_row, key_dim, value_dim, heads,
    heads_per_group, normalize, scale,
    K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """One token of a request, of one head; a row of padding becomes zero and touches no slot."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    value, key = tl.program_id(2) * V + tl.arange(0, V), tl.arange(0, K)
    is_value, is_key = value < value_dim, key < key_dim
    target = y + (row * heads + head) * value_dim + value
    slot = tl.load(slots + row)
    if slot < 0:
        tl.store(target, tl.zeros((V,), y.dtype.element_ty), mask=is_value)
    else:
        is_state = is_key[:, None] & is_value[None, :]
        cell = live + slot * live_row + (head * key_dim + key)[:, None] * value_dim + value[None, :]
        channel = (head // heads_per_group) * key_dim + key
        keys = tl.load(k + row * k_row + channel, mask=is_key, other=0.0).to(tl.float32)
        queries = tl.load(q + row * q_row + channel, mask=is_key, other=0.0).to(tl.float32)
        if normalize != 0:
            keys *= tl.rsqrt(tl.sum(keys * keys, 0) + NORM_EPSILON)
            queries *= tl.rsqrt(tl.sum(queries * queries, 0) + NORM_EPSILON)
        values = tl.load(v + row * v_row + head * value_dim + value, mask=is_value, other=0.0).to(tl.float32)
        state = tl.load(cell, mask=is_state, other=0.0).to(tl.float32) * tl.exp(tl.load(g + row * g_row + head))
        missing = (values - tl.sum(keys[:, None] * state, 0)) * tl.load(beta + row * beta_row + head)
        state += keys[:, None] * missing[None, :]
        outputs = tl.sum(queries[:, None] * state, 0) * scale
        tl.store(target, outputs.to(y.dtype.element_ty), mask=is_value)
        tl.store(cell, state.to(live.dtype.element_ty), mask=is_state)
