"""Gates and norms over groups of channels on a CUDA device: a program computes one group of one row, or a part.

All arithmetic is fp32 and rounded once. The order of a sum over a group depends on the group's size alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton.language as tl
from torch import Tensor

from megatron_ext.ops.backends import NoKernelError
from megatron_ext.ops.gated_norm import NamedNorm, Order, RowNorm
from megatron_ext.ops.triton.kernel_registry import FLOATS, Config, config, kernel
from megatron_ext.ops.triton.launching import require_one_type, rowed, rows_of

TYPES = [{"T": name} for name in FLOATS]
BY_SIZE = (config(num_warps=1, BLOCK=128), config(BLOCK=1024), config(num_warps=8, BLOCK=4096))
GATE_FIRST, NORM_FIRST = tl.constexpr(Order.GATE_FIRST.value), tl.constexpr(Order.NORM_FIRST.value)


@kernel(
    pointers={"T": "x gate weight y"},
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


@kernel(pointers={"T": "x gate y"}, scalars="factor", types=TYPES, configs=[config(BLOCK=1024)])
def gate_rows(x, gate, y, x_row, gate_row, channels, factor, BLOCK: tl.constexpr):
    """Compute x * SiLU(factor * gate); the grid is (rows, blocks of channels); y [rows, channels]."""
    row, channel = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_channel = channel < channels
    values = tl.load(x + row * x_row + channel, mask=is_channel, other=0.0).to(tl.float32)
    z = tl.load(gate + row * gate_row + channel, mask=is_channel, other=0.0).to(tl.float32) * factor
    tl.store(y + row * channels + channel, (values * (z * tl.sigmoid(z))).to(y.dtype.element_ty), mask=is_channel)


@kernel(
    pointers={"T": "output residual weight added y"},
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


def _require(*inputs: Tensor | None) -> None:
    """Raise `NoKernelError` unless a kernel supports these inputs."""
    require_one_type("gates and norms", *inputs)
    norm_rows.require(T=next(one.dtype for one in inputs if one is not None))


def _config(group_size: int) -> Config:
    """Return the configuration for groups of this size; groups larger than every block take several blocks."""
    *_, largest = BY_SIZE
    return next((one for one in BY_SIZE if one["BLOCK"] >= group_size), largest)


def launch_norm_rows(x: Tensor, gate: Tensor | None, norm: RowNorm, *, group_size: int, order: Order) -> Tensor:
    """Return any norm of rows [T, Cn], with a gate [T, Cn] or None; of the same type. Not differentiable."""
    _require(x, gate, norm.weight)
    (rows, channels), x, y = x.shape, rows_of(x), x.new_empty(x.shape)
    weight = x if norm.weight is None else norm.weight.contiguous()  # the stand-in for None is not read
    norm_rows.launch(
        (rows, channels // group_size),
        _config(group_size),
        **rowed(x=x, gate=x if gate is None else gate),
        weight=weight,
        y=y,
        group_size=group_size,
        order=order.value,
        weight_step=group_size if norm.weight is not None and weight.numel() == channels else 0,
        has_weight=int(norm.weight is not None),
        eps=norm.eps,
        offset=norm.offset,
    )
    return y


def launch_gated_norm(y: Tensor, gate: Tensor, weight: Tensor, *, group_size: int, eps: float) -> Tensor:
    return launch_norm_rows(y, gate, RowNorm(weight, eps), group_size=group_size, order=Order.GATE_FIRST)


def launch_norm_then_gate(
    y: Tensor, gate: Tensor, norm: RowNorm | None, plain: Callable[[Tensor], Tensor], *, group_size: int
) -> Tensor:
    if norm is None:
        return launch_silu_gate(plain(y), gate)
    return launch_norm_rows(y, gate, norm, group_size=group_size, order=Order.NORM_FIRST)


def launch_rms_norm(x: Tensor, norm: RowNorm, _: Callable[[Tensor], Tensor]) -> Tensor:
    rows, size = x.flatten(0, -2), x.shape[-1]
    return launch_norm_rows(rows, None, norm, group_size=size, order=Order.NO_GATE).view(x.shape)


def launch_add_and_norm(output: Tensor, residual: Tensor, norm: object, factor: float) -> tuple[Tensor, Tensor] | None:
    if not isinstance(norm, NamedNorm):
        return None
    own = norm.row_norm
    _require(output, residual, own.weight)
    if not (output.is_contiguous() and residual.is_contiguous() and output.shape == residual.shape):
        raise NoKernelError("sums and norms have no kernel for tensors that are not contiguous")
    added, normed, channels = torch.empty_like(output), torch.empty_like(output), output.shape[-1]
    add_norm_rows.launch(
        (output.numel() // channels,),
        _config(channels),
        output=output,
        residual=residual,
        weight=output if own.weight is None else own.weight.contiguous(),  # the stand-in for None is not read
        added=added,
        y=normed,
        channels=channels,
        has_weight=int(own.weight is not None),
        factor=factor,
        eps=own.eps,
        offset=own.offset,
    )
    return added, normed


def launch_silu_gate(y: Tensor, gate: Tensor, factor: float = 1.0) -> Tensor:
    _require(y, gate)
    (config,), (rows, channels), gated = gate_rows.configs, y.shape, y.new_empty(y.shape)
    grid = rows, -(-channels // config["BLOCK"])
    gate_rows.launch(grid, config, **rowed(x=y, gate=gate), y=gated, channels=channels, factor=factor)
    return gated
