"""Copies of states on a CUDA device: both kinds, all layers and rows in one launch, as untyped words."""

import triton
import triton.language as tl

from megatron_ext.ops.triton.kernel_registry import config, kernel

WORDS = ("i16", "i32")


@triton.jit
def copy_block(source, target, size, block, BLOCK: tl.constexpr):
    """Copy BLOCK of the `size` words at `source` to `target`."""
    at = block * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(source + at, mask=at < size)
    tl.store(target + at, words, mask=at < size)


@kernel(
    pointers={"C": "conv_from conv_to", "R": "state_from state_to", "i64": "rows target_rows"},
    strides="conv_from_layer conv_from_row conv_to_layer conv_to_row state_from_layer state_from_row state_to_layer "
    "state_to_row conv_size state_size",
    types=[{"C": conv, "R": state} for conv in WORDS for state in WORDS],
    configs=[config(BLOCK=2048)],
)
def copy_states(
    conv_from, conv_to, state_from, state_to, rows, target_rows, conv_from_layer, conv_from_row, conv_to_layer,
    conv_to_row, state_from_layer, state_from_row, state_to_layer, state_to_row, conv_size, state_size,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy a block of one row of one layer; the grid is (pairs of rows, layers, blocks of both kinds)."""
    pair, layer, block = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    row, target_row = tl.load(rows + pair), tl.load(target_rows + pair)
    conv_blocks = tl.cdiv(conv_size, BLOCK)
    if (row >= 0) & (target_row >= 0):
        if block < conv_blocks:
            source = conv_from + layer * conv_from_layer + row * conv_from_row
            copy_block(source, conv_to + layer * conv_to_layer + target_row * conv_to_row, conv_size, block, BLOCK)
        else:
            block -= conv_blocks
            state = state_from + layer * state_from_layer + row * state_from_row
            copy_block(state, state_to + layer * state_to_layer + target_row * state_to_row, state_size, block, BLOCK)
