"""Mamba-2's recurrence on a CUDA device: prefill in tiles of tokens, and one token of each request.

A program computes TILE tokens of one head at a time, for P of its channels with all N states, which stay in registers
from the sequence's first token of the step to its last. Outputs do not depend, to the bit, on which states are kept,
nor on cuts of a sequence at multiples of TILE; nor do the states depend on such cuts.

Outputs are sums over the N states, so a head with many states is split over programs of `MAX_STATES` each, whose
outputs the caller adds.

Inputs of a prefill are fp32, and products have full precision, without tensor cores. Inputs of 16 bits are converted
before, unless `kernels_tiles.py` computes them.
"""

import triton
import triton.language as tl

from megatron_ext.ops.triton.device import next_kept, store_kept
from megatron_ext.ops.triton.kernel_registry import FLOATS, MAX_REGISTERS, STATE_TYPES, config, kernel

TILE = 16
MAX_STATES = 128


@triton.jit
def _added(x, b, weights):
    """Return the contribution of tokens with these weights to the state: [P, N], of x [TILE, P] and b [TILE, N]."""
    return tl.dot(tl.trans(x * weights[:, None]), b, input_precision="ieee")


@triton.jit
def _outputs(x, b, c, dt, elapsed, state, TILE: tl.constexpr):
    """Return outputs [TILE, P]: contributions of the tile's own tokens and of the state before the tile.

    x [TILE, P]; b and c [TILE, N]; dt and elapsed, the logarithm of the decay from the tile's start, [TILE].
    """
    place = tl.arange(0, TILE)
    is_earlier = place[:, None] >= place[None, :]
    decay = tl.where(is_earlier, tl.exp(tl.minimum(elapsed[:, None] - elapsed[None, :], 0.0)), 0.0)
    scores = tl.dot(c, tl.trans(b), input_precision="ieee") * decay * dt[None, :]
    read = tl.dot(c, tl.trans(state), input_precision="ieee") * tl.exp(elapsed)[:, None]
    return read + tl.dot(scores, x, input_precision="ieee")


@kernel(
    pointers={
        "fp32": "x B C y dt A D",
        "S": "live snapshots",
        "i64": "cu_seqlens slots kept_slots kept_sequences kept_tokens",
        "i1": "has_initial",
    },
    strides="x_row dt_row b_row c_row y_part live_row snapshot_row head_dim state_size",
    counts="kept heads heads_per_group has_skip",
    types=[{"S": states} for states in FLOATS],
    configs=[config(registers=MAX_REGISTERS, num_warps=8, TILE=TILE, P=16, N=n) for n in (16, 32, 64, MAX_STATES)],
)
def ssd_prefill(
    x, dt, A, B, C, D, y, live, snapshots, cu_seqlens, slots, kept_slots, kept_sequences, kept_tokens, has_initial,
    x_row, dt_row, b_row, c_row, y_part, live_row, snapshot_row, head_dim, state_size, kept, heads, heads_per_group,
    has_skip,
    TILE: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Compute outputs of a sequence's tokens of one head; write the kept states and, in place, the final state."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + sequence)
    begin, end = tl.load(cu_seqlens + sequence).to(tl.int32), tl.load(cu_seqlens + sequence + 1).to(tl.int32)
    if (slot >= 0) & (begin < end):
        parts = tl.cdiv(state_size, N)
        part, place = tl.program_id(2) % parts, tl.arange(0, TILE)
        p, n = tl.program_id(2) // parts * P + tl.arange(0, P), part * N + tl.arange(0, N)
        is_p, is_n = (p < head_dim)[None, :], (n < state_size)[None, :]
        is_state = (p < head_dim)[:, None] & is_n
        cell = (head * head_dim + p)[:, None] * state_size + n[None, :]
        has_state = tl.load(has_initial + sequence).to(tl.int1)
        state = tl.load(live + slot * live_row + cell, mask=is_state & has_state, other=0.0).to(tl.float32)
        rate, skip = tl.load(A + head), tl.load(D + head, mask=(has_skip != 0) & (part == 0), other=0.0)
        group = head // heads_per_group
        stop = next_kept(kept_sequences, kept_tokens, kept, sequence, begin)
        first = begin.to(tl.int64)
        column = (group * state_size + n)[None, :]
        for start in range(begin, end, TILE):
            is_token = start + place < end
            is_input, is_column = is_token[:, None] & is_p, is_token[:, None] & is_n
            steps = tl.load(dt + first * dt_row + head + place * dt_row, mask=is_token, other=0.0)
            own = x + first * x_row + head * head_dim
            inputs = tl.load(own + place[:, None] * x_row + p[None, :], mask=is_input, other=0.0)
            b = tl.load(B + first * b_row + place[:, None] * b_row + column, mask=is_column, other=0.0)
            c = tl.load(C + first * c_row + place[:, None] * c_row + column, mask=is_column, other=0.0)
            elapsed = tl.cumsum(steps * rate, 0)
            outputs = skip * inputs + _outputs(inputs, b, c, steps, elapsed, state, TILE)
            target = (
                y
                + part.to(tl.int64) * y_part
                + (first * heads + head) * head_dim
                + place[:, None] * (heads * head_dim)
                + p[None, :]
            )
            tl.store(target, outputs, mask=is_input)
            while stop <= start + TILE:
                until = tl.sum(tl.where(place == stop - start - 1, elapsed, 0.0), 0)
                # Exponents of later tokens are positive and could overflow, although their weights are masked.
                weights = tl.where(place < stop - start, steps * tl.exp(tl.minimum(until - elapsed, 0.0)), 0.0)
                there = state * tl.exp(until) + _added(inputs, b, weights)
                store_kept(
                    snapshots, snapshot_row, there, cell, is_state,
                    kept_slots, kept_sequences, kept_tokens, kept, sequence, stop,
                )  # fmt: skip
                stop = next_kept(kept_sequences, kept_tokens, kept, sequence, stop)
            first += TILE
            whole = tl.sum(tl.where(place == TILE - 1, elapsed, 0.0), 0)
            state = state * tl.exp(whole) + _added(inputs, b, steps * tl.exp(tl.minimum(whole - elapsed, 0.0)))
        tl.store(live + slot * live_row + cell, state.to(live.dtype.element_ty), mask=is_state)


@kernel(
    pointers={"T": "x B C y", "fp32": "dt A D", "S": "live", "i64": "slots"},
    strides="x_row dt_row b_row c_row live_row head_dim state_size",
    counts="heads heads_per_group has_skip",
    types=STATE_TYPES,
    configs=[
        config(registers=MAX_REGISTERS, P=32, N=16),
        config(registers=MAX_REGISTERS, P=32, N=32),
        config(registers=MAX_REGISTERS, P=32, N=64),
        config(registers=MAX_REGISTERS, P=16, N=128),
        config(registers=MAX_REGISTERS, P=8, N=256),
    ],
)
def ssd_decode(
    x, dt, A, B, C, D, y, live, slots, x_row, dt_row, b_row, c_row, live_row, head_dim, state_size, heads,
    heads_per_group, has_skip,
    P: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Compute one token of a request, of one head; a padding row becomes zero and touches no slot."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    p, n = tl.program_id(2) * P + tl.arange(0, P), tl.arange(0, N)
    is_p, is_n = p < head_dim, n < state_size
    target = y + row * (heads * head_dim) + head * head_dim + p
    slot = tl.load(slots + row)
    if slot < 0:
        tl.store(target, tl.zeros((P,), y.dtype.element_ty), mask=is_p)
    else:
        is_state = is_p[:, None] & is_n[None, :]
        cell = live + slot * live_row + (head * head_dim + p)[:, None] * state_size + n[None, :]
        state = tl.load(cell, mask=is_state, other=0.0).to(tl.float32)
        step, rate = tl.load(dt + row * dt_row + head), tl.load(A + head)
        inputs = tl.load(x + row * x_row + head * head_dim + p, mask=is_p, other=0.0).to(tl.float32)
        column = (head // heads_per_group) * state_size + n
        b = tl.load(B + row * b_row + column, mask=is_n, other=0.0).to(tl.float32)
        c = tl.load(C + row * c_row + column, mask=is_n, other=0.0).to(tl.float32)
        state = state * tl.exp(step * rate) + (inputs * step)[:, None] * b[None, :]
        skip = tl.load(D + head, mask=has_skip != 0, other=0.0)
        outputs = tl.sum(state * c[None, :], 1) + skip * inputs
        tl.store(target, outputs.to(y.dtype.element_ty), mask=is_p)
        tl.store(cell, state.to(live.dtype.element_ty), mask=is_state)
