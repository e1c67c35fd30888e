"""Gated delta rule on a CUDA device: prefill in tiles of tokens, and one token of each request.

Formulas and letters are as in `reference.py`, a tile being its chunk. Terms without the state are computed for all
tiles at once (`delta_tiles`). A program of `delta_prefill` then computes some value channels V of one head of one
sequence, whose state stays in registers from the sequence's first token of the step to its last. Tiles begin at the
sequence's first token of the step. Outputs do not depend, to the bit, on which states are kept, nor on cuts of a
sequence at multiples of TILE; nor do the states depend on such cuts.

Sums of log decays are fp64 and split in two fp32 numbers before differences are taken: with fast decay they reach
thousands. (I + L) is inverted by blocks, which is stable where powers of L are not.

Products of 16-bit inputs are exact and summed in fp32; products of fp32 inputs have full precision. Products of fp32
numbers with inputs that enter states have full precision or nearly: see `precise_product`, and tf32x3. Products for
outputs have at least tf32 precision.

Data of the next tile that the state update needs are loaded while the current tile is computed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_ext.ops.backends import NoKernelError
from megatron_ext.ops.state_slots import DecodeStates, PrefillStates
from megatron_ext.ops.triton import architecture, launching
from megatron_ext.ops.triton.device import find_piece, kept_place, product, store_kept
from megatron_ext.ops.triton.kernel_registry import FLOATS, MAX_REGISTERS, STATE_TYPES, Argument, config, kernel

MAX_ODD_KEYS = 64  # for more keys, loading elements one by one takes too many registers
TILES = dict(zip(FLOATS, (16, 32, 32), strict=True))  # tokens; full fp32 products leave no registers for more
CHANNELS = dict(zip(FLOATS, (16, 32, 32), strict=True))  # key channels at once in `delta_tiles`
WARPS = dict(
    zip(FLOATS, ((8, 8), (4, 4), (8, 8)), strict=True)
)  # for 64 and 128 key channels: the fewest that registers allow
MORE_WARPS: dict[tuple[str, int], dict[tuple[int, ...], int]] = {("bf16", 128): {(90,): 4, (80,): 8}}
"""Warps by architecture where it matters: with 4, Triton 3.6 spills on sm_80."""
NORM_EPSILON = tl.constexpr(1e-6)  # as in `reference.py`
INPUTS = [{"T": inputs} for inputs in FLOATS]


@triton.jit
def load_keys(keys, row, row_stride, group, key_dim, is_token, K: tl.constexpr):
    """Load keys or queries of the tokens `row`: [tokens, K]; zero at padding."""
    channel = tl.arange(0, K)
    at = row[:, None] * row_stride + (group * key_dim + channel)[None, :]
    return tl.load(keys + at, mask=is_token[:, None] & (channel < key_dim)[None, :], other=0.0)


@triton.jit
def first_bits(b, MASK: tl.constexpr):
    """Clear the last bits of fp32 significands; `b` minus the result is exact and holds the cleared bits."""
    return (b.to(tl.int32, bitcast=True) & MASK).to(tl.float32, bitcast=True)


@triton.jit
def precise_product(a, b):
    """Multiply inputs `a`, as they were loaded, with fp32 `b`, in fp32 precision or nearly.

    16-bit numbers are exact in any operand. For bf16, `b` is split into three numbers of 8 bits. The second and third
    are multiplied by 2**8 and 2**16, so that they have separate sums and the three products run in parallel. For fp16,
    whose exponent range is too small for that, `b` is split into two tf32 numbers.
    """
    if a.dtype == tl.bfloat16:
        high = first_bits(b, MASK=-65536)  # bf16 has 16 bits less
        rest = (b - high) * 256.0
        middle = first_bits(rest, MASK=-65536)
        low = (rest - middle) * 256.0
        small = product(a, middle.to(tl.bfloat16), FULL_FP32=False)
        small += product(a, low.to(tl.bfloat16), FULL_FP32=False) * 2.0**-8
        total = product(a, high.to(tl.bfloat16), FULL_FP32=False) + small * 2.0**-8
    elif a.dtype == tl.float16:
        high, wide = first_bits(b, MASK=-8192), a.to(tl.float32)  # tf32 has 13 bits less
        total = tl.dot(wide, b - high, input_precision="tf32") + tl.dot(wide, high, input_precision="tf32")
    else:
        total = tl.dot(a, b, input_precision="ieee")
    return total


@triton.jit
def output_product(a, b):
    """Multiply `a` with fp32 `b` for outputs, where 11 bits of `b` suffice if `a` has 16 bits."""
    if a.dtype == tl.bfloat16:
        high = first_bits(b, MASK=-65536)
        rest = ((b - high) * 256.0).to(tl.bfloat16)
        total = product(a, high.to(tl.bfloat16), FULL_FP32=False) + product(a, rest, FULL_FP32=False) * 2.0**-8
    else:
        total = tl.dot(a.to(tl.float32), b, input_precision="ieee" if a.dtype == tl.float32 else "tf32")
    return total


@triton.jit
def invert(lower, TILE: tl.constexpr):
    """Return the inverse of I + `lower` [TILE, TILE], which is zero on the diagonal and above it.

    Block sizes double each time: the inverse of [[A, 0], [C, B]] is [[A^-1, 0], [-B^-1 C A^-1, B^-1]].
    """
    place = tl.arange(0, TILE)
    is_c = (place[:, None] % 2 == 1) & (place[None, :] == place[:, None] - 1)
    inverse = tl.where(place[:, None] == place[None, :], 1.0, 0.0) - tl.where(is_c, lower, 0.0)  # blocks of 2
    size = 2
    while size < TILE:
        block = place // size
        is_c = (block[:, None] % 2 == 1) & (block[None, :] == block[:, None] - 1)
        times = tl.dot(inverse, tl.where(is_c, lower, 0.0), input_precision="tf32x3")
        inverse -= tl.dot(times, inverse, input_precision="tf32x3")
        size *= 2
    return inverse


@triton.jit
def fading(elapsed, count, lengths, TILE: tl.constexpr):
    """Return the decay of the state over a tile's first `count` tokens, and the factors of their keys after them."""
    place = tl.arange(0, TILE)
    until = tl.sum(tl.where(place == count - 1, elapsed, 0.0), 0)
    return tl.exp(until.to(tl.float32)), tl.where(
        place < count, tl.exp((until - elapsed).to(tl.float32)), 0.0
    ) * lengths


@kernel(
    pointers={"T": "q k", "fp32": "g beta solved mixed key_lengths reads asks writes fades", "i64": "cu_seqlens"},
    counts="sequences heads heads_per_group normalize",
    scalars="scale",
    types=INPUTS,
    configs=[
        config(num_stages=3, TILE=tile, CHANNELS=CHANNELS[one], only=(one,), registers=MAX_REGISTERS)
        for one, tile in TILES.items()
    ],
)
def delta_tiles(
    q, k, g, beta, solved, mixed, key_lengths, reads, asks, writes, fades, cu_seqlens, q_row, k_row, g_row, beta_row,
    key_dim, sequences, heads, heads_per_group, normalize, scale,
    TILE: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Compute (I + L)^-1 diag(beta) of a tile of one head, and the weight of each token's write in each output.

    The grid is (tiles of `find_piece`, heads); solved and mixed are [T, H, TILE], a row for each token. The others are
    [T, H] factors: of a token's key before any use (key_lengths), of the key when it reads the tile's first state
    (reads), of the query when it reads that state (asks), of the key when it is written to the tile's last state
    (writes), and the decay of the first state until then (fades).
    """
    FULL_FP32: tl.constexpr = (
        q.dtype.element_ty == tl.float32
    )  # products of 16-bit numbers are exact on tensor cores, too
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
            keys = tl.load(k + row[:, None] * k_row + column, mask=is_real, other=0.0)
            queries = tl.load(q + row[:, None] * q_row + column, mask=is_real, other=0.0)
            between_keys += product(keys, tl.trans(keys), FULL_FP32=FULL_FP32)
            to_queries += product(queries, tl.trans(keys), FULL_FP32=FULL_FP32)
            keys, queries = keys.to(tl.float32), queries.to(tl.float32)
            key_squares += tl.sum(keys * keys, 1)
            query_squares += tl.sum(queries * queries, 1)
        key_length = tl.where(normalize != 0, tl.rsqrt(key_squares + NORM_EPSILON), 1.0)
        query_length = tl.where(normalize != 0, tl.rsqrt(query_squares + NORM_EPSILON), 1.0) * scale
        strength = tl.load(beta + row * beta_row + head, mask=is_token, other=0.0)
        elapsed = tl.cumsum(tl.load(g + row * g_row + head, mask=is_token, other=0.0).to(tl.float64), 0)
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
        decay = tl.exp(high)
        fade, lasting = fading(elapsed, TILE, key_length, TILE)
        tl.store(reads + token, decay * key_length, mask=is_token)
        tl.store(asks + token, decay * query_length, mask=is_token)
        tl.store(writes + token, lasting, mask=is_token)
        tl.store(fades + token, tl.zeros([TILE], tl.float32) + fade, mask=is_token)


@triton.jit
def load_tile(
    k, v, solved, reads, writes, k_row, v_row, key_dim, value_dim, start, end, head, heads, heads_per_group, value,
    TILE: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Load the inputs of a tile's state update, as stored, zeros after the end.

    Returns keys, their factors for reading and for writing, some values, and the inverse that `delta_tiles` made.
    """
    place = tl.arange(0, TILE)
    row = (start + place).to(tl.int64)
    is_token, token = row < end, row * heads + head
    is_value = is_token[:, None] & (value < value_dim)[None, :]
    return (
        load_keys(k, row, k_row, head // heads_per_group, key_dim, is_token, K=K),
        tl.load(reads + token, mask=is_token, other=0.0),
        tl.load(writes + token, mask=is_token, other=0.0),
        tl.load(v + row[:, None] * v_row + (head * value_dim + value)[None, :], mask=is_value, other=0.0),
        tl.load(solved + token[:, None] * TILE + place[None, :], mask=is_token[:, None], other=0.0),
    )


@kernel(
    pointers={
        "T": "q k v y",
        "fp32": "g solved mixed key_lengths reads asks writes fades",
        "S": "live snapshots",
        "i64": "cu_seqlens slots kept_slots kept_offsets kept_tokens",
        "i1": "has_initial",
    },
    counts="kept heads heads_per_group",
    types=STATE_TYPES,
    configs=[
        config(
            TILE=tile,
            K=keys,
            V=16,
            num_warps=warps,
            only=(one,),
            registers=MAX_REGISTERS,
            aligned=keys > MAX_ODD_KEYS,
            archs=archs,
        )
        for one, tile in TILES.items()
        for keys, warps in zip((16, 32, 64, 128), (4, 4, *WARPS[one]), strict=True)
        for archs, warps in MORE_WARPS.get((one, keys), {(): warps}).items()
    ],
)
def delta_prefill(
    q, k, v, g, solved, mixed, key_lengths, reads, asks, writes, fades, y, live, snapshots, cu_seqlens, slots,
    kept_slots, kept_offsets, kept_tokens, has_initial, q_row, k_row, v_row, g_row, live_row, snapshot_row, key_dim,
    value_dim, kept, heads, heads_per_group,
    TILE: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Compute outputs of a sequence's tokens of one head; write the kept states and, in place, the final state."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + sequence)
    begin, end = tl.load(cu_seqlens + sequence).to(tl.int32), tl.load(cu_seqlens + sequence + 1).to(tl.int32)
    if (slot >= 0) & (begin < end):
        IS_WIDE: tl.constexpr = q.dtype.element_ty == tl.float32
        value, key, place = tl.program_id(2) * V + tl.arange(0, V), tl.arange(0, K), tl.arange(0, TILE)
        is_value = (value < value_dim)[None, :]
        is_state = (key < key_dim)[:, None] & is_value
        cell = (head * key_dim + key)[:, None] * value_dim + value[None, :]
        has_state = tl.load(has_initial + sequence).to(tl.int1)
        state = tl.load(live + slot * live_row + cell, mask=is_state & has_state, other=0.0).to(tl.float32)
        entry = tl.load(kept_offsets + sequence).to(tl.int32)
        stop = kept_place(kept_offsets, kept_tokens, kept, sequence, entry)
        tile = load_tile(
            k, v, solved, reads, writes, k_row, v_row, key_dim, value_dim, begin, end, head, heads, heads_per_group,
            value, TILE=TILE, K=K,
        )  # fmt: skip
        for start in range(begin, end, TILE):
            row = (start + place).to(tl.int64)
            is_token, token = row < end, row * heads + head
            fade = tl.load(fades + tl.min(token, 0))
            queries = load_keys(q, row, q_row, head // heads_per_group, key_dim, is_token, K=K)
            ask = tl.load(asks + token, mask=is_token, other=0.0)
            weights = tl.load(mixed + token[:, None] * TILE + place[None, :], mask=is_token[:, None], other=0.0)
            # One tile ahead, so that its loads overlap with the products of this one.
            following = load_tile(
                k, v, solved, reads, writes, k_row, v_row, key_dim, value_dim, start + TILE, end, head, heads,
                heads_per_group, value, TILE=TILE, K=K,
            )  # fmt: skip
            keys, read, write, values, inverse = tile
            missing = values.to(tl.float32) - precise_product(keys, state) * read[:, None]
            written = tl.dot(inverse, missing, input_precision="ieee" if IS_WIDE else "tf32x3")
            outputs = output_product(queries, state) * ask[:, None]
            outputs += tl.dot(weights, written, input_precision="ieee" if IS_WIDE else "tf32")
            target = y + token[:, None] * value_dim + value[None, :]
            tl.store(target, outputs.to(y.dtype.element_ty), mask=is_token[:, None] & is_value)
            while stop <= start + TILE:
                elapsed = tl.cumsum(tl.load(g + row * g_row + head, mask=is_token, other=0.0).to(tl.float64), 0)
                key_length = tl.load(key_lengths + token, mask=is_token, other=0.0)
                until_there, lasting = fading(elapsed, stop - start, key_length, TILE)
                there = state * until_there + precise_product(tl.trans(keys), written * lasting[:, None])
                store_kept(snapshots, snapshot_row, there, cell, is_state, kept_slots, entry)
                entry += 1
                stop = kept_place(kept_offsets, kept_tokens, kept, sequence, entry)
            state = state * fade + precise_product(tl.trans(keys), written * write[:, None])
            tile = following
        tl.store(live + slot * live_row + cell, state.to(live.dtype.element_ty), mask=is_state)


@kernel(
    pointers={"T": "q k v y", "fp32": "g beta", "S": "live", "i64": "slots"},
    counts="heads heads_per_group normalize",
    scalars="scale",
    types=STATE_TYPES,
    configs=[config(K=keys, V=values) for keys, values in ((16, 32), (32, 32), (64, 32), (128, 16))],
)
def delta_decode(
    q, k, v, g, beta, y, live, slots, q_row, k_row, v_row, g_row, beta_row, live_row, key_dim, value_dim, heads,
    heads_per_group, normalize, scale,
    K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Compute one token of a request, of one head; a padding row becomes zero and touches no slot."""
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


SCALES = ("key_lengths", "reads", "asks", "writes", "fades")
"""Results of `delta_tiles` for each token and head, [T, H] each."""


def _arguments(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, live: Tensor, normalize: bool
) -> dict[str, Argument]:
    """Return the kernels' arguments by parameter name.

    Raises:
        NoKernelError: There is no kernel for them.
    """
    (heads, value_dim), (groups, key_dim) = v.shape[1:], k.shape[1:]
    launching.require_states(delta_prefill, live, q, v, K=key_dim)
    if key_dim > MAX_ODD_KEYS and not launching.is_aligned(q, k, v):
        raise NoKernelError(
            f"the gated delta rule has no kernel for {key_dim} and {value_dim} channels, only for multiples of 16"
        )
    return launching.rowed(q=q, k=k, v=v, g=g.float(), beta=beta.float()) | {
        "key_dim": key_dim,
        "value_dim": value_dim,
        "heads": heads,
        "heads_per_group": heads // groups,
        "normalize": int(normalize),
        "scale": key_dim**-0.5,
    }


def launch_prefill(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: PrefillStates, *, normalize: bool = False
) -> Tensor:
    arguments = _arguments(q, k, v, g, beta, states.live, normalize) | launching.prefill_arguments(states)
    tiling = delta_tiles.config_for(q.dtype)
    config = delta_prefill.config_for(q.dtype, architecture(q.device), K=k.shape[2])
    (tokens, heads, value_dim), sequences, tile = v.shape, states.slots.live.numel(), config["TILE"]
    solved, mixed = torch.empty(2, tokens, heads, tile, dtype=torch.float32, device=v.device)
    scales = torch.empty(len(SCALES), tokens, heads, dtype=torch.float32, device=v.device)
    y = torch.zeros(v.shape, dtype=v.dtype, device=v.device)  # also rows after the last sequence
    arguments |= {"y": y, "solved": solved, "mixed": mixed, "sequences": sequences}
    arguments |= dict(zip(SCALES, scales, strict=True))
    delta_tiles.launch_with((launching.tile_count(tokens, sequences, 1, tile), heads), tiling, arguments)
    delta_prefill.launch_with((sequences, heads, -(-value_dim // config["V"])), config, arguments)
    return y


def launch_decode(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: DecodeStates, *, normalize: bool = False
) -> Tensor:
    arguments = _arguments(q, k, v, g, beta, states.live, normalize) | launching.decode_arguments(states, v)
    y, (rows, heads, value_dim) = torch.empty(v.shape, dtype=v.dtype, device=v.device), v.shape
    config = delta_decode.config_for(q.dtype, K=k.shape[2])
    delta_decode.launch_with((rows, heads, -(-value_dim // config["V"])), config, arguments | {"y": y})
    return y
