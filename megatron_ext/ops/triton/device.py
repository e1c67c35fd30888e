"""Device functions that kernels call. Needs triton, as kernels do."""

import triton
import triton.language as tl

from megatron_ext.ops.triton import is_interpreted

NEVER = tl.constexpr(2**30)
"""Number larger than the tokens of any step."""
INTERPRETED = tl.constexpr(is_interpreted())


@triton.jit
def product(a, b, FULL_FP32: tl.constexpr):
    """Matrix product of two tiles of one type, summed in fp32; fp32 inputs are rounded to tf32 unless FULL_FP32.

    Triton's interpreter multiplies bf16 by its bits; widening first gives the device's result, since products of 16-bit
    numbers are exact in fp32.
    """
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee" if FULL_FP32 else "tf32")


@triton.jit
def kept_place(kept_offsets, kept_tokens, kept, sequence, entry):
    """Return the tokens of the packed step after which an entry's state is kept; NEVER after the sequence's last entry.

    The lists come from `SnapshotPlaces` and have `kept` entries. Ends are loaded each time, since registers are scarce.
    """
    end = tl.minimum(tl.load(kept_offsets + sequence + 1), kept)
    return tl.load(kept_tokens + entry, mask=entry < end, other=NEVER).to(tl.int32)


@triton.jit
def find_piece(starts, pieces, tile, rows, SIZE: tl.constexpr, LEAST: tl.constexpr = 1):
    """Return the piece that a tile belongs to, and the tile's first row in it, which may lie after the piece's last.

    `starts` are the `pieces` + 1 boundaries of pieces; tiles of SIZE rows are numbered as in `launching.tile_count`.
    """
    origin = tl.load(starts)
    low = tile * 0
    high = low + pieces
    while high - low > 1:
        middle = (low + high) // 2
        is_before = (tl.load(starts + middle) - origin).to(tl.int32) * rows // SIZE + LEAST * middle <= tile
        low = tl.where(is_before, middle, low)
        high = tl.where(is_before, high, middle)
    first = (tl.load(starts + low) - origin).to(tl.int32) * rows // SIZE + LEAST * low
    return low, (tile - first) * SIZE


@triton.jit
def store_kept(snapshots, snapshot_row, state, cell, is_state, kept_slots, entry):
    """Write a state to the slot of an entry; `cell` is the offset of the state's elements in a slot."""
    target = snapshots + tl.load(kept_slots + entry) * snapshot_row + cell
    tl.store(target, state.to(snapshots.dtype.element_ty), mask=is_state)
