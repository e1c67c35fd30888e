"""Gates and norms in Triton, for CUDA devices: one launch each, with the kernels in `kernels.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ext.ops import triton
from megatron_ext.ops.backends import NoKernelError
from megatron_ext.ops.gated_norm.reference import GateBackend, Order, RowNorm
from megatron_ext.ops.triton.kernel_registry import Config
from megatron_ext.ops.triton.launching import require_one_type, rowed, rows_of


def _require(*inputs: Tensor | None) -> None:
    """Raise `NoKernelError` unless a kernel supports these inputs."""
    from megatron_ext.ops.gated_norm import kernels

    require_one_type("gates and norms", *inputs)
    kernels.norm_rows.require(T=next(one.dtype for one in inputs if one is not None))


def _config(group_size: int) -> Config:
    """Return the configuration for groups of this size; groups larger than every block take several blocks."""
    from megatron_ext.ops.gated_norm import kernels

    *_, largest = kernels.BY_SIZE
    return next((one for one in kernels.BY_SIZE if one["BLOCK"] >= group_size), largest)


def norm_rows(x: Tensor, gate: Tensor | None, norm: RowNorm, *, group_size: int, order: Order) -> Tensor:
    _require(x, gate, norm.weight)
    from megatron_ext.ops.gated_norm import kernels

    (rows, channels), x, y = x.shape, rows_of(x), x.new_empty(x.shape)
    weight = x if norm.weight is None else norm.weight.contiguous()  # the stand-in for None is not read
    kernels.norm_rows.launch(
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


def add_and_norm(output: Tensor, residual: Tensor, norm: RowNorm, factor: float) -> tuple[Tensor, Tensor]:
    _require(output, residual, norm.weight)
    if not (output.is_contiguous() and residual.is_contiguous() and output.shape == residual.shape):
        raise NoKernelError("sums and norms have no kernel for tensors that are not contiguous")
    from megatron_ext.ops.gated_norm import kernels

    added, normed, channels = torch.empty_like(output), torch.empty_like(output), output.shape[-1]
    kernels.add_norm_rows.launch(
        (output.numel() // channels,),
        _config(channels),
        output=output,
        residual=residual,
        weight=output if norm.weight is None else norm.weight.contiguous(),  # the stand-in for None is not read
        added=added,
        y=normed,
        channels=channels,
        has_weight=int(norm.weight is not None),
        factor=factor,
        eps=norm.eps,
        offset=norm.offset,
    )
    return added, normed


def gated_norm(y: Tensor, gate: Tensor, weight: Tensor, *, group_size: int, eps: float) -> Tensor:
    return norm_rows(y, gate, RowNorm(weight, eps), group_size=group_size, order=Order.GATE_FIRST)


def silu_gate(y: Tensor, gate: Tensor) -> Tensor:
    _require(y, gate)
    from megatron_ext.ops.gated_norm import kernels

    (config,), (rows, channels), gated = kernels.gate_rows.configs, y.shape, y.new_empty(y.shape)
    kernels.gate_rows.launch(
        (rows, -(-channels // config["BLOCK"])),
        config,
        **rowed(x=y, gate=gate),
        y=gated,
        channels=channels,
    )
    return gated


BACKEND = GateBackend(triton.NAME, triton.takes, gated_norm, silu_gate, norm_rows, add_and_norm)
