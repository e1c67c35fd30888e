"""Copies of states on a CUDA device: both kinds, all layers and rows in one launch, as untyped words."""

import triton
import triton.language as tl

from megatron_ext.ops.triton.kernel_registry import config, kernel

WORDS = ("i16", "i32")


@triton.jit
def copy_block(source, target, row, target_row, layer, slots, target_slots, size, block, BLOCK: tl.constexpr):
    """Copy BLOCK words of a row of one layer; pools are [L, slots, size]."""
    at = block * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(source + (layer * slots + row) * size + at, mask=at < size)
    tl.store(target + (layer * target_slots + target_row) * size + at, words, mask=at < size)


@kernel(
    pointers={"C": "conv_from conv_to", "R": "state_from state_to", "i64": "rows target_rows"},
    strides="conv_size state_size",
    counts="slots target_slots",
    types=[{"C": conv, "R": state} for conv in WORDS for state in WORDS],
    configs=[config(BLOCK=2048)],
)
def copy_states(
    conv_from, conv_to, state_from, state_to, rows, target_rows, conv_size, state_size, slots, target_slots,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy a block of one row of one layer; the grid is (pairs of rows, layers, blocks of both kinds)."""
    pair, layer, block = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    row, target_row = tl.load(rows + pair), tl.load(target_rows + pair)
    conv_blocks = tl.cdiv(conv_size, BLOCK)
    if (row >= 0) & (target_row >= 0):
        if block < conv_blocks:
            copy_block(conv_from, conv_to, row, target_row, layer, slots, target_slots, conv_size, block, BLOCK)
        else:
            block -= conv_blocks
            copy_block(state_from, state_to, row, target_row, layer, slots, target_slots, state_size, block, BLOCK)
