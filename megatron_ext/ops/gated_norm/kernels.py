"""Gates and norms over groups of channels on a CUDA device: a program computes one group of one row, or a part.

All arithmetic is fp32 and rounded once. The order of a sum over a group depends on the group's size alone.
"""

import triton.language as tl

from megatron_ext.ops.gated_norm.reference import Order
from megatron_ext.ops.triton.kernel_registry import FLOATS, config, kernel

TYPES = [{"T": name} for name in FLOATS]
BY_SIZE = (config(num_warps=1, BLOCK=128), config(BLOCK=1024), config(num_warps=8, BLOCK=4096))
GATE_FIRST, NORM_FIRST = tl.constexpr(Order.GATE_FIRST.value), tl.constexpr(Order.NORM_FIRST.value)


@kernel(
    pointers={"T": "x gate weight y"},
    strides="x_row gate_row group_size",
    counts="order weight_step has_weight",
    scalars="eps offset",
    types=TYPES,
    configs=BY_SIZE,
)
def norm_rows(
    x, gate, weight, y, x_row, gate_row, group_size, order, weight_step, has_weight, eps, offset,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """RMS norm of a group of a row, with a gate before it, after it or none; the grid is (rows, groups).

    y [rows, groups * group_size]; weights of consecutive groups are `weight_step` apart, and `offset` is added to each.
    """
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    source, gates = x + row * x_row + group * group_size, gate + row * gate_row + group * group_size
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, group_size, BLOCK):
        channel = start + tl.arange(0, BLOCK)
        is_channel = channel < group_size
        values = tl.load(source + channel, mask=is_channel, other=0.0).to(tl.float32)
        z = tl.load(gates + channel, mask=is_channel & (order == GATE_FIRST), other=0.0).to(tl.float32)
        values = tl.where(order == GATE_FIRST, values * (z * tl.sigmoid(z)), values)
        squares += values * values
    scale = tl.rsqrt(tl.sum(squares, 0) / group_size + eps)
    target = y + row * (tl.num_programs(1) * group_size) + group * group_size
    for start in range(0, group_size, BLOCK):
        channel = start + tl.arange(0, BLOCK)
        is_channel = channel < group_size
        values = tl.load(source + channel, mask=is_channel, other=0.0).to(tl.float32)
        z = tl.load(gates + channel, mask=is_channel & (order != 0), other=0.0).to(tl.float32)
        gated = z * tl.sigmoid(z)
        values = tl.where(order == GATE_FIRST, values * gated, values) * scale
        own = weight + group * weight_step + channel
        values *= tl.load(own, mask=is_channel & (has_weight != 0), other=1.0).to(tl.float32) + offset
        values = tl.where(order == NORM_FIRST, values * gated, values)
        tl.store(target + channel, values.to(y.dtype.element_ty), mask=is_channel)


@kernel(
    pointers={"T": "x gate y"},
    strides="x_row gate_row channels",
    types=TYPES,
    configs=[config(BLOCK=1024)],
)
def gate_rows(x, gate, y, x_row, gate_row, channels, BLOCK: tl.constexpr):
    """Compute x * SiLU(gate); the grid is (rows, blocks of channels); y [rows, channels]."""
    row, channel = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_channel = channel < channels
    values = tl.load(x + row * x_row + channel, mask=is_channel, other=0.0).to(tl.float32)
    z = tl.load(gate + row * gate_row + channel, mask=is_channel, other=0.0).to(tl.float32)
    tl.store(y + row * channels + channel, (values * (z * tl.sigmoid(z))).to(y.dtype.element_ty), mask=is_channel)


@kernel(
    pointers={"T": "output residual weight added y"},
    strides="channels",
    counts="has_weight",
    scalars="factor eps offset",
    types=TYPES,
    configs=BY_SIZE,
)
def add_norm_rows(
    output, residual, weight, added, y, channels, has_weight, factor, eps, offset,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute residual + factor * output, and its RMS norm; the grid is the rows, all contiguous.

    Values are rounded where plain torch rounds: after the factor, after the sum, after the norm.
    """
    row = tl.program_id(0).to(tl.int64) * channels
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, channels, BLOCK):
        channel = start + tl.arange(0, BLOCK)
        is_channel = channel < channels
        own = tl.load(output + row + channel, mask=is_channel, other=0.0).to(tl.float32) * factor
        before = tl.load(residual + row + channel, mask=is_channel, other=0.0).to(tl.float32)
        total = (own.to(added.dtype.element_ty).to(tl.float32) + before).to(added.dtype.element_ty)
        tl.store(added + row + channel, total, mask=is_channel)
        squares += total.to(tl.float32) * total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(squares, 0) / channels + eps)
    for start in range(0, channels, BLOCK):  # added again: other threads' stores above may not be visible yet
        channel = start + tl.arange(0, BLOCK)
        is_channel = channel < channels
        own = tl.load(output + row + channel, mask=is_channel, other=0.0).to(tl.float32) * factor
        before = tl.load(residual + row + channel, mask=is_channel, other=0.0).to(tl.float32)
        total = (own.to(added.dtype.element_ty).to(tl.float32) + before).to(added.dtype.element_ty)
        weights = tl.load(weight + channel, mask=is_channel & (has_weight != 0), other=1.0).to(tl.float32) + offset
        tl.store(y + row + channel, (total.to(tl.float32) * scale * weights).to(y.dtype.element_ty), mask=is_channel)
