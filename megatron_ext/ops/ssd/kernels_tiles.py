"""Mamba-2's prefill on a CUDA device with inputs of 16 bits: outputs of all tiles of tokens at once.

A tile is TILE tokens at a multiple of TILE of the absolute position; a sequence's first and last may have fewer in this
step. First, `chunk_cumsum` computes the elapsed decay at each token of a tile. Then `state_passing` passes states
through their sequences, with one product per tile, and stores the state that enters each tile; this is the only
sequential step. Last, `chunk_scan` computes every tile's outputs from its own tokens and from its entering state. So a
token's result depends on its own tile and on the fp32 state that enters the tile, not on which states are kept, nor on
cuts of its sequence at absolute multiples of TILE, to the bit.

Products of two inputs are exact, and summed in fp32. Products for states are nearly fp32: for bf16 the computed factor
is a sum of two bf16 numbers; for fp16, whose range is small, three products in tf32 are used. Products for outputs
round the computed factor to bf16, as Mamba's own kernels do, or for fp16 to tf32.

Letters: T tokens, S sequences, H heads, P channels of a head, N states of a channel. Tiles are numbered as in
`launching.tile_count`, so that the grid and all buffers follow from shapes; some tiles have no tokens.
"""

import triton
import triton.language as tl

from megatron_ext.ops.triton.device import find_piece, kept_place, product, store_kept
from megatron_ext.ops.triton.kernel_registry import config, kernel

TILE = 64
LEAST = tl.constexpr(2)
"""Tiles of a sequence at least: as many as it needs for any cut of its first tile."""
THREE_BLOCKS = 168
"""Maximum number of registers of a thread at which three blocks of 4 warps fit a multiprocessor."""
TYPES = ({"T": "bf16", "Z": "bf16"}, {"T": "fp16", "Z": "fp32"})
"""Types of inputs T, and of the states Z stored for the outputs; the range of fp16 is too small for Z."""


@triton.jit
def sequence_tiles(cu_seqlens, ends, sequence, TILE: tl.constexpr):
    """Return a sequence's first token of the packed step, its end, the start of its first tile, and the tile's number.

    `ends` [S] are absolute positions after the last token. The tile may begin before the sequence does.
    """
    begin, end = tl.load(cu_seqlens + sequence).to(tl.int32), tl.load(cu_seqlens + sequence + 1).to(tl.int32)
    number = (begin - tl.load(cu_seqlens).to(tl.int32)) // TILE + LEAST * sequence
    position = tl.load(ends + sequence).to(tl.int32) - (end - begin)
    return begin, end, begin - position % TILE, number


@triton.jit
def tokens_of_tile(cu_seqlens, ends, sequences, tile, TILE: tl.constexpr):
    """Return the sequence of a tile, the tile's first token, and the sequence's first token and end."""
    sequence, row = find_piece(cu_seqlens, sequences, tile, 1, TILE, LEAST)
    begin, end, first, _ = sequence_tiles(cu_seqlens, ends, sequence, TILE)
    return sequence, first + row, begin, end


@kernel(
    pointers={"fp32": "dt A high low steps weights", "i64": "cu_seqlens ends"},
    counts="sequences heads",
    configs=[config(TILE=TILE, HEADS=16)],
)
def chunk_cumsum(
    dt, A, high, low, steps, weights, cu_seqlens, ends, dt_row, sequences, heads,
    TILE: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Compute the elapsed decay at each token [tiles, H, TILE], its step, and its weight in the state after the tile.

    Elapsed is the logarithm of the decay from the tile's start to the end of the token, summed in fp64 and split in two
    numbers: with fast decay it reaches thousands, and only differences are used. Tokens of other sequences have a step
    of zero. The grid is (tiles, heads / HEADS).
    """
    tile = tl.program_id(0)
    _, first, begin, end = tokens_of_tile(cu_seqlens, ends, sequences, tile, TILE)
    if (first < end) & (begin < end):
        place, head = tl.arange(0, TILE), tl.program_id(1) * HEADS + tl.arange(0, HEADS)
        token, is_head = first + place, (head < heads)[None, :]
        is_step = ((token >= begin) & (token < end))[:, None] & is_head
        step = tl.load(dt + token.to(tl.int64)[:, None] * dt_row + head[None, :], mask=is_step, other=0.0)
        rate = tl.load(A + head, mask=head < heads, other=0.0)
        elapsed = tl.cumsum((step * rate[None, :]).to(tl.float64), 0)
        whole = tl.sum(tl.where(place[:, None] == TILE - 1, elapsed, 0.0), 0)
        rounded = elapsed.to(tl.float32)
        at = (tile.to(tl.int64) * heads + head)[None, :] * TILE + place[:, None]
        tl.store(high + at, rounded, mask=is_head)
        tl.store(low + at, (elapsed - rounded.to(tl.float64)).to(tl.float32), mask=is_head)
        tl.store(steps + at, step, mask=is_head)
        tl.store(weights + at, step * tl.exp((whole[None, :] - elapsed).to(tl.float32)), mask=is_head)


@triton.jit
def added(x, b, weights):
    """Return the contribution of tokens with these weights to a state: [P, N] fp32, of x [TILE, P] and b [TILE, N]."""
    weighted = b.to(tl.float32) * weights[:, None]
    if b.dtype == tl.bfloat16:
        coarse = weighted.to(tl.bfloat16)
        fine = (weighted - coarse.to(tl.float32)).to(tl.bfloat16)
        sums = product(tl.trans(x), fine, False) + product(tl.trans(x), coarse, False)
    else:
        sums = tl.dot(tl.trans(x.to(tl.float32)), weighted, input_precision="tf32x3")
    return sums


@triton.jit
def weights_until(high, low, steps, row, count, TILE: tl.constexpr):
    """Return a state's decay over the first `count` tokens of a tile, and their weights in the state after them."""
    place = tl.arange(0, TILE)
    coarse, fine = tl.load(high + row + place), tl.load(low + row + place)
    until, rest = tl.load(high + row + count - 1), tl.load(low + row + count - 1)
    gap = tl.minimum((until - coarse) + (rest - fine), 0.0)
    return tl.exp(until), tl.where(place < count, tl.load(steps + row + place) * tl.exp(gap), 0.0)


@triton.jit
def load_tokens(t, first, begin, end, row_stride, column, is_column, TILE: tl.constexpr):
    """Load some columns of the tile of tokens that begins at `first`, zero for tokens outside the sequence."""
    place = tl.arange(0, TILE)
    is_token = (first + place >= begin) & (first + place < end)
    own = t + first.to(tl.int64) * row_stride
    at = place[:, None] * row_stride + column[None, :]
    return tl.load(own + at, mask=is_token[:, None] & is_column[None, :], other=0.0)


@kernel(
    pointers={
        "T": "x B",
        "Z": "entering",
        "S": "live snapshots",
        "fp32": "high low steps weights",
        "i64": "cu_seqlens ends slots kept_slots kept_offsets kept_tokens",
        "i1": "has_initial",
    },
    counts="kept heads heads_per_group",
    types=[{**types, "S": states} for types in TYPES for states in ("fp32", types["T"])],
    configs=[
        config(TILE=TILE, P=64, N=32, only=("bf16",), aligned=True),
        config(TILE=TILE, P=64, N=16, only=("fp16",), aligned=True),
    ],
)
def state_passing(
    x, B, entering, live, snapshots, high, low, steps, weights, cu_seqlens, ends, slots, kept_slots, kept_offsets,
    kept_tokens, has_initial, x_row, b_row, live_row, snapshot_row, head_dim, state_size, kept, heads, heads_per_group,
    TILE: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Pass P x N elements of a head's state through its sequence.

    They are written to `entering` [tiles, H, P, N] before every tile, to the snapshots to keep, and finally to the
    running state slot. The loop over tiles contains no other loop, so that its loads are prefetched; it is left where a
    state is kept. The grid is (parts of all heads' states, sequences).
    """
    sequence = tl.program_id(1)
    slot = tl.load(slots + sequence)
    begin, end, first, number = sequence_tiles(cu_seqlens, ends, sequence, TILE)
    if (slot >= 0) & (begin < end):
        n_parts, p_parts = tl.cdiv(state_size, N), tl.cdiv(head_dim, P)
        part, place = tl.program_id(0), tl.arange(0, TILE)
        head = part // (n_parts * p_parts)
        p, n = part // n_parts % p_parts * P + tl.arange(0, P), part % n_parts * N + tl.arange(0, N)
        is_p, is_n = p < head_dim, n < state_size
        is_state, size = is_p[:, None] & is_n[None, :], head_dim * state_size
        own = p[:, None] * state_size + n[None, :]
        cell = head * size + own
        has_state = tl.load(has_initial + sequence).to(tl.int1)
        state = tl.load(live + slot * live_row + cell, mask=is_state & has_state, other=0.0).to(tl.float32)
        of_x, of_b = head * head_dim + p, head // heads_per_group * state_size + n
        entry = tl.load(kept_offsets + sequence).to(tl.int32)
        stop = kept_place(kept_offsets, kept_tokens, kept, sequence, entry)
        tile, tiles = 0, tl.cdiv(end - first, TILE)
        while (tile < tiles) | (stop <= end):  # several states may be kept at one place
            until = tl.where(stop >= end, tiles, (stop - first) // TILE)
            for i in range(tile, until):
                row = (number + i).to(tl.int64) * heads + head
                tl.store(entering + row * size + own, state.to(entering.dtype.element_ty), mask=is_state)
                whole, start = tl.load(high + row * TILE + TILE - 1), first + i * TILE
                inputs = load_tokens(x, start, begin, end, x_row, of_x, is_p, TILE)
                b = load_tokens(B, start, begin, end, b_row, of_b, is_n, TILE)
                state = state * tl.exp(whole) + added(inputs, b, tl.load(weights + row * TILE + place))
            tile = until
            done = tl.minimum(first + tile * TILE, end)
            if stop == done:
                store_kept(snapshots, snapshot_row, state, cell, is_state, kept_slots, entry)
                entry += 1
                stop = kept_place(kept_offsets, kept_tokens, kept, sequence, entry)
            while (stop > done) & (stop < tl.minimum(done + TILE, end)):
                row = ((number + tile).to(tl.int64) * heads + head) * TILE
                fade, lasting = weights_until(high, low, steps, row, stop - done, TILE)
                inputs = load_tokens(x, done, begin, end, x_row, of_x, is_p, TILE)
                b = load_tokens(B, done, begin, end, b_row, of_b, is_n, TILE)
                store_kept(
                    snapshots, snapshot_row, state * fade + added(inputs, b, lasting), cell, is_state, kept_slots, entry
                )
                entry += 1
                stop = kept_place(kept_offsets, kept_tokens, kept, sequence, entry)
        slot = tl.load(slots + sequence)  # loaded again: registers are scarce, and the slot is not needed in between
        tl.store(live + slot * live_row + cell, state.to(live.dtype.element_ty), mask=is_state)


@triton.jit
def weighted_sum(weights, x):
    """Return outputs [TILE, P]: computed weights [TILE, TILE] times inputs [TILE, P]."""
    if x.dtype == tl.bfloat16:
        sums = product(weights.to(tl.bfloat16), x, False)
    else:
        sums = tl.dot(weights, x.to(tl.float32), input_precision="tf32")
    return sums


@kernel(
    pointers={
        "T": "x B C y",
        "Z": "entering",
        "fp32": "D high low steps",
        "i64": "cu_seqlens ends slots",
    },
    counts="sequences heads heads_per_group heads_each has_skip",
    types=TYPES,
    configs=[
        config(num_stages=3, TILE=TILE, P=64, N=64, only=("bf16",), registers=THREE_BLOCKS, aligned=True),
        config(TILE=TILE, P=64, N=128, only=("bf16",), registers=THREE_BLOCKS, aligned=True),
        config(num_stages=3, TILE=TILE, P=64, N=256, num_warps=8, only=("bf16",), aligned=True),
        config(TILE=TILE, P=32, N=64, only=("fp16",), aligned=True),
        config(TILE=TILE, P=32, N=128, num_warps=8, only=("fp16",), aligned=True),
    ],
)
def chunk_scan(
    x, B, C, D, y, entering, high, low, steps, cu_seqlens, ends, slots, x_row, b_row, c_row, head_dim, state_size,
    sequences, heads, heads_per_group, heads_each, has_skip,
    TILE: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Compute a tile's outputs for `heads_each` heads that share B and C; zeros if the sequence is padding.

    The grid is (runs of heads, tiles, parts of P channels): programs that share inputs run next to each other.
    """
    tile = tl.program_id(1)
    head_dim, state_size = head_dim.to(tl.int32), state_size.to(tl.int32)  # offsets in a tile fit 32 bits
    sequence, first, begin, end = tokens_of_tile(cu_seqlens, ends, sequences, tile, TILE)
    if (first < end) & (begin < end):
        runs = tl.cdiv(heads_per_group, heads_each)
        group, place, n = tl.program_id(0) // runs, tl.arange(0, TILE), tl.arange(0, N)
        head = group * heads_per_group + tl.program_id(0) % runs * heads_each
        last = tl.minimum(head + heads_each, (group + 1) * heads_per_group)
        p, token = tl.program_id(2) * P + tl.arange(0, P), first + place
        is_p, is_n = p < head_dim, n < state_size
        is_output = ((token >= begin) & (token < end))[:, None] & is_p[None, :]
        c = load_tokens(C, first, begin, end, c_row, group * state_size + n, is_n, TILE)
        b = load_tokens(B, first, begin, end, b_row, group * state_size + n, is_n, TILE)
        between = tl.where(place[:, None] >= place[None, :], product(c, tl.trans(b), False), 0.0)
        target = y + first.to(tl.int64) * heads * head_dim
        target += place[:, None] * (heads * head_dim) + p[None, :]
        if tl.load(slots + sequence) < 0:
            for h in range(head, last):
                tl.store(target + h * head_dim, tl.zeros([TILE, P], y.dtype.element_ty), mask=is_output)
            last = head
        for h in range(head, last):
            row = tile.to(tl.int64) * heads + h
            own = entering + row * (head_dim * state_size) + p[:, None] * state_size + n[None, :]
            state = tl.load(own, mask=is_p[:, None] & is_n[None, :], other=0.0)
            inputs = load_tokens(x, first, begin, end, x_row, h * head_dim + p, is_p, TILE)
            at = row * TILE + place
            elapsed, rest = tl.load(high + at), tl.load(low + at)
            if state.dtype == c.dtype:
                read = product(c, tl.trans(state), False)
            else:
                read = tl.dot(c.to(tl.float32), tl.trans(state), input_precision="tf32")
            gap = (elapsed[:, None] - elapsed[None, :]) + (rest[:, None] - rest[None, :])
            weights = between * tl.exp(tl.minimum(gap, 0.0)) * tl.load(steps + at)[None, :]
            skip = tl.load(D + h, mask=has_skip != 0, other=0.0)
            outputs = read * tl.exp(elapsed)[:, None] + skip * inputs.to(tl.float32) + weighted_sum(weights, inputs)
            tl.store(target + h * head_dim, outputs.to(y.dtype.element_ty), mask=is_output)
