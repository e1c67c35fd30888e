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
    counts="pairs layers",
    types=[{"C": conv, "R": state} for conv in WORDS for state in WORDS],
    configs=[config(BLOCK=2048, PAIRS=pairs) for pairs in (16, 256, 4096)],
)
def copy_states(
    conv_from, conv_to, state_from, state_to, rows, target_rows, conv_from_layer, conv_from_row, conv_to_layer,
    conv_to_row, state_from_layer, state_from_row, state_to_layer, state_to_row, conv_size, state_size, pairs, layers,
    BLOCK: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Copy blocks of rows of layers, of both kinds; programs take turns over the blocks, and skip padding pairs.

    The grid is any number of programs: in most steps there are few pairs, or none, among many that are padding.
    """
    place = tl.arange(0, PAIRS)
    sources = tl.load(rows + place, mask=place < pairs, other=-1)
    targets = tl.load(target_rows + place, mask=place < pairs, other=-1)
    is_pair = (sources >= 0) & (targets >= 0)
    number = tl.cumsum(is_pair.to(tl.int32), 0)
    conv_blocks = tl.cdiv(conv_size, BLOCK).to(tl.int32)
    blocks = conv_blocks + tl.cdiv(state_size, BLOCK).to(tl.int32)
    for item in range(tl.program_id(0), tl.sum(is_pair.to(tl.int32), 0) * layers * blocks, tl.num_programs(0)):
        is_own = is_pair & (number == item // (layers * blocks) + 1)
        row, target_row = tl.sum(tl.where(is_own, sources, 0), 0), tl.sum(tl.where(is_own, targets, 0), 0)
        layer, block = (item // blocks % layers).to(tl.int64), item % blocks
        if block < conv_blocks:
            source = conv_from + layer * conv_from_layer + row * conv_from_row
            copy_block(source, conv_to + layer * conv_to_layer + target_row * conv_to_row, conv_size, block, BLOCK)
        else:
            state = state_from + layer * state_from_layer + row * state_from_row
            target = state_to + layer * state_to_layer + target_row * state_to_row
            copy_block(state, target, state_size, block - conv_blocks, BLOCK)
