"""Gates and norms in Triton, for CUDA devices: one launch each, with the kernels in `kernels.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ext.ops import triton
from megatron_ext.ops.gated_norm import reference
from megatron_ext.ops.gated_norm.reference import GateBackend, Order, RowNorm
from megatron_ext.ops.triton.kernel_registry import Config
from megatron_ext.ops.triton.launching import rows_of, say_reference_computes


def _lacks(x: Tensor, *others: Tensor | None) -> str | None:
    """Return why there is no kernel for these inputs; None if there is one."""
    from megatron_ext.ops.gated_norm import kernels

    different = [one.dtype for one in others if one is not None and one.dtype != x.dtype]
    if different:
        return f"gates and norms have no kernel for inputs of {x.dtype} and {different[0]}"
    return kernels.norm_rows.lacks(T=x.dtype)


def _config(group_size: int) -> Config:
    """Return the configuration for groups of this size; groups larger than every block take several blocks."""
    from megatron_ext.ops.gated_norm import kernels

    *_, largest = kernels.BY_SIZE
    return next((one for one in kernels.BY_SIZE if one["BLOCK"] >= group_size), largest)


def norm_rows(x: Tensor, gate: Tensor | None, norm: RowNorm, *, group_size: int, order: Order) -> Tensor | None:
    lack = _lacks(x, gate, norm.weight)
    if lack is not None:
        say_reference_computes(lack)
        return None
    return _launch_norm(rows_of(x), gate, norm, group_size, order)


def _launch_norm(x: Tensor, gate: Tensor | None, norm: RowNorm, group_size: int, order: Order) -> Tensor:
    from megatron_ext.ops.gated_norm import kernels

    (rows, channels), y = x.shape, x.new_empty(x.shape)
    gate = x if gate is None else rows_of(gate)
    weight = x if norm.weight is None else norm.weight.contiguous()  # the stand-in for None is not read
    kernels.norm_rows.launch(
        (rows, channels // group_size),
        _config(group_size),
        x=x,
        gate=gate,
        weight=weight,
        y=y,
        x_row=x.stride(0),
        gate_row=gate.stride(0),
        group_size=group_size,
        order=order.value,
        weight_step=group_size if norm.weight is not None and weight.numel() == channels else 0,
        has_weight=int(norm.weight is not None),
        eps=norm.eps,
        offset=norm.offset,
    )
    return y


def add_and_norm(output: Tensor, residual: Tensor, norm: RowNorm, factor: float) -> tuple[Tensor, Tensor] | None:
    lack = _lacks(output, residual, norm.weight)
    if lack is None and not (output.is_contiguous() and residual.is_contiguous() and output.shape == residual.shape):
        lack = "sums and norms have no kernel for tensors that are not contiguous"
    if lack is not None:
        say_reference_computes(lack)
        return None
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
    found = norm_rows(y, gate, RowNorm(weight, eps), group_size=group_size, order=Order.GATE_FIRST)
    return reference.gated_norm(y, gate, weight, group_size=group_size, eps=eps) if found is None else found


def silu_gate(y: Tensor, gate: Tensor) -> Tensor:
    lack = _lacks(y, gate)
    if lack is not None:
        say_reference_computes(lack)
        return reference.silu_gate(y, gate)
    from megatron_ext.ops.gated_norm import kernels

    y, gate, (config,) = rows_of(y), rows_of(gate), kernels.gate_rows.configs
    rows, channels = y.shape
    gated = y.new_empty(y.shape)
    kernels.gate_rows.launch(
        (rows, -(-channels // config["BLOCK"])),
        config,
        x=y,
        gate=gate,
        y=gated,
        x_row=y.stride(0),
        gate_row=gate.stride(0),
        channels=channels,
    )
    return gated


BACKEND = GateBackend(triton.NAME, triton.takes, gated_norm, silu_gate, norm_rows, add_and_norm)
