"""Mamba-2's recurrence on a CUDA device: prefill in tiles of tokens, and one token of each request.

A program computes TILE tokens of one head at a time, for P of its channels with all N states, which stay in registers
from the sequence's first token of the step to its last. Outputs do not depend, to the bit, on which states are kept,
nor on cuts of a sequence at multiples of TILE; nor do the states depend on such cuts.

Outputs are sums over the N states, so a head with many states is split over programs of `MAX_STATES` each, whose
outputs the caller adds.

Inputs of a prefill are fp32, and products have full precision, without tensor cores. Inputs of 16 bits are converted
before, unless `kernels_tiles.py` computes them: if states are resumed at multiples of a tile (blocks of 64 tokens, and
multiples of that). The choice depends on the model and on the block size.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_ext.ops.backends import log_once
from megatron_ext.ops.ssd import kernels_tiles
from megatron_ext.ops.state_slots import DecodeStates, PrefillStates
from megatron_ext.ops.triton import launching
from megatron_ext.ops.triton.device import kept_place, store_kept
from megatron_ext.ops.triton.kernel_registry import FLOATS, MAX_REGISTERS, STATE_TYPES, Argument, config, kernel
from megatron_ext.ops.varlen import PackedChunks

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
        "i64": "cu_seqlens slots kept_slots kept_offsets kept_tokens",
        "i1": "has_initial",
    },
    counts="kept heads heads_per_group has_skip",
    types=[{"S": states} for states in FLOATS],
    configs=[config(registers=MAX_REGISTERS, num_warps=8, TILE=TILE, P=16, N=n) for n in (16, 32, 64, MAX_STATES)],
)
def ssd_prefill(
    x, dt, A, B, C, D, y, live, snapshots, cu_seqlens, slots, kept_slots, kept_offsets, kept_tokens, has_initial,
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
        entry = tl.load(kept_offsets + sequence).to(tl.int32)
        stop = kept_place(kept_offsets, kept_tokens, kept, sequence, entry)
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
                store_kept(snapshots, snapshot_row, there, cell, is_state, kept_slots, entry)
                entry += 1
                stop = kept_place(kept_offsets, kept_tokens, kept, sequence, entry)
            first += TILE
            whole = tl.sum(tl.where(place == TILE - 1, elapsed, 0.0), 0)
            state = state * tl.exp(whole) + _added(inputs, b, steps * tl.exp(tl.minimum(whole - elapsed, 0.0)))
        tl.store(live + slot * live_row + cell, state.to(live.dtype.element_ty), mask=is_state)


@kernel(
    pointers={"T": "x B C y", "fp32": "dt A D", "S": "live", "i64": "slots"},
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


def _arguments(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None) -> dict[str, Argument]:
    """Return the arguments of both kernels; the stand-in for a missing D is not read."""
    (heads, head_dim), rates = x.shape[1:], A.float().contiguous()
    return launching.rowed(x=x, dt=dt.float(), B=B, C=C) | {
        "A": rates,
        "D": rates if D is None else D.float().contiguous(),
        "head_dim": head_dim,
        "state_size": B.shape[2],
        "heads": heads,
        "heads_per_group": heads // B.shape[1],
        "has_skip": int(D is not None),
    }


WRITTEN_DOWN = {torch.bfloat16: torch.bfloat16, torch.float16: torch.float32}
"""Type of the inputs -> type of the states passed between the kernels; fp16 overflows on the largest states."""
MAX_HEADS = 8
"""Maximum number of heads that one program of outputs computes in turn; they share B, C and their product."""


def _tiles_lack(x: Tensor, B: Tensor, C: Tensor, chunks: PackedChunks) -> str | None:
    """Return why these kernels do not support the inputs; None if they do."""
    if x.dtype not in WRITTEN_DOWN:
        return f"inputs are of {x.dtype}"
    if chunks.resumes is None or chunks.resumes.multiple % kernels_tiles.TILE:
        length = "any number of" if chunks.resumes is None else chunks.resumes.multiple
        return f"blocks have {length} tokens, not a multiple of {kernels_tiles.TILE}"
    if kernels_tiles.chunk_scan.fitting(x.dtype, N=B.shape[2]) is None:
        return f"there are {B.shape[2]} states of {x.dtype}"
    if not launching.is_aligned(x, B, C):
        return f"{x.shape[2]} channels and {B.shape[2]} states do not lie at multiples of 16"
    return None


def _prefill_tiles(arguments: Mapping[str, Argument], x: Tensor, B: Tensor, chunks: PackedChunks) -> Tensor:
    """Compute outputs [T, H, P]; states are read and written in place.

    Temporary buffers hold the state of a head for every tile, T / 64 + 2 S of them, in `WRITTEN_DOWN` types: 338 MB for
    16,384 tokens of 80 heads of 64 x 128 states in bf16; and 16 bytes for each token and head.

    Args:
        arguments: Arguments of the kernels by name: inputs, their strides and sizes, and the `prefill_arguments`.
        x: [T, H, P].
        B: [T, G, N].
        chunks: Chunks with `resumes`.
    """
    assert chunks.resumes is not None, "see `_tiles_lack`"
    (rows, heads, head_dim), (groups, state_size) = x.shape, B.shape[1:]
    tile, ends = kernels_tiles.TILE, chunks.resumes.ends
    sequences = ends.numel()
    tiles = launching.tile_count(rows, sequences, 1, tile, kernels_tiles.LEAST.value)
    high, low, steps, weights = torch.empty(4, tiles, heads, tile, dtype=torch.float32, device=x.device)
    runs = -(-(heads // groups) // MAX_HEADS)
    y = x.new_empty(x.shape)
    # After the last sequence, and everywhere if only the device knows its end.
    y[0 if chunks.sequences.has_static_shapes else chunks.sequences.num_tokens :].zero_()
    given = {
        **arguments,
        "y": y,
        "entering": x.new_empty(tiles, heads, head_dim, state_size, dtype=WRITTEN_DOWN[x.dtype]),
        "high": high,
        "low": low,
        "steps": steps,
        "weights": weights,
        "ends": ends,
        "sequences": sequences,
        "heads_each": -(-(heads // groups) // runs),
    }
    config = kernels_tiles.chunk_cumsum.config_for(x.dtype)
    kernels_tiles.chunk_cumsum.launch_with((tiles, -(-heads // config["HEADS"])), config, given)
    config = kernels_tiles.state_passing.config_for(x.dtype)
    parts = -(-head_dim // config["P"]) * -(-state_size // config["N"])
    kernels_tiles.state_passing.launch_with((heads * parts, sequences), config, given)
    config = kernels_tiles.chunk_scan.config_for(x.dtype, N=state_size)
    kernels_tiles.chunk_scan.launch_with((groups * runs, tiles, -(-head_dim // config["P"])), config, given)
    return y


def launch_prefill(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, states: PrefillStates, *, D: Tensor | None = None
) -> Tensor:
    """Compute a prefill of the inputs of `reference.ssd_scan`."""
    launching.require_states(ssd_decode, states.live, x, B, N=B.shape[2])
    places = launching.prefill_arguments(states)
    lack = _tiles_lack(x, B, C, states.chunks)
    if lack is None:
        return _prefill_tiles(_arguments(x, dt, A, B, C, D) | places, x, B, states.chunks)
    if x.dtype != torch.float32:
        log_once(f"ssd converts inputs of a prefill to fp32 and computes them in order, which is slower: {lack}")
    state_size = B.shape[2]
    config = ssd_prefill.config_for(x.dtype, N=min(state_size, MAX_STATES))
    parts, (rows, heads, head_dim) = -(-state_size // config["N"]), x.shape
    y = x.new_zeros(parts, rows, heads, head_dim, dtype=torch.float32)
    given = _arguments(x.float(), dt, A, B.float(), C.float(), D) | places
    given |= {"y": y, "y_part": rows * heads * head_dim}
    grid = states.slots.live.numel(), heads, -(-head_dim // config["P"]) * parts
    ssd_prefill.launch_with(grid, config, given)
    return (y[0] if parts == 1 else y.sum(0)).to(x.dtype)


def launch_decode(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, states: DecodeStates, *, D: Tensor | None = None
) -> Tensor:
    launching.require_states(ssd_decode, states.live, x, B, N=B.shape[2])
    y, (rows, heads, head_dim) = x.new_empty(x.shape), x.shape
    config = ssd_decode.config_for(x.dtype, N=B.shape[2])
    given = _arguments(x, dt, A, B, C, D) | launching.decode_arguments(states, x) | {"y": y}
    ssd_decode.launch_with((rows, heads, -(-head_dim // config["P"])), config, given)
    return y
