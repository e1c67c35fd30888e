"""What kernels call: functions that run on the device. Needs triton, as kernels do."""

import triton
import triton.language as tl

from megatron_ext.ops.triton import is_interpreted

NEVER = tl.constexpr(2**30)
"""More tokens than a step has."""
INTERPRETED = tl.constexpr(is_interpreted())


@triton.jit
def product(a, b, FULL_FP32: tl.constexpr):
    """Matrix product of two tiles of one type, summed in fp32; of fp32 rounded to tf32 unless FULL_FP32.

    Triton's interpreter multiplies bf16 by its bits; widened first it gives what the device does, since products of
    16-bit numbers are exact in fp32.
    """
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee" if FULL_FP32 else "tf32")


@triton.jit
def next_kept(kept_sequences, kept_tokens, kept, sequence, after):
    """The first place behind `after`, in tokens of the packed step, whose state of this sequence is to be kept.

    NEVER if there is none. The lists, of `kept` places, are those of `SnapshotPlaces`, in any order.
    """
    found = NEVER
    for i in range(kept):
        tokens = tl.load(kept_tokens + i).to(tl.int32)
        is_candidate = (tl.load(kept_sequences + i) == sequence) & (tokens > after) & (tokens < found)
        found = tl.where(is_candidate, tokens, found)
    return found


@triton.jit
def find_piece(starts, pieces, tile, rows, SIZE: tl.constexpr):
    """The piece that a tile belongs to, and the tile's first row in it, which may lie behind the piece's last.

    `starts` are the `pieces` + 1 places where they begin and end; tiles, of SIZE rows, as `grids.tile_count` has them.
    """
    origin = tl.load(starts)
    low = tile * 0
    high = low + pieces
    while high - low > 1:
        middle = (low + high) // 2
        is_before = (tl.load(starts + middle) - origin).to(tl.int32) * rows // SIZE + middle <= tile
        low = tl.where(is_before, middle, low)
        high = tl.where(is_before, high, middle)
    first = (tl.load(starts + low) - origin).to(tl.int32) * rows // SIZE + low
    return low, (tile - first) * SIZE


@triton.jit
def store_kept(
    snapshots, snapshot_row, state, cell, is_state, kept_slots, kept_sequences, kept_tokens, kept, sequence, tokens
):
    """Write a sequence's state behind so many tokens of the packed step to the slots that are to keep it.

    `cell` says where its elements lie in a slot; padding, a slot of -1, is left out.
    """
    for i in range(kept):
        is_here = (tl.load(kept_sequences + i) == sequence) & (tl.load(kept_tokens + i) == tokens)
        slot = tl.load(kept_slots + i)
        if is_here & (slot >= 0):
            target = snapshots + slot * snapshot_row + cell
            tl.store(target, state.to(snapshots.dtype.element_ty), mask=is_state)
