"""MLP activations on a CUDA device: computed in fp32 and rounded once; NaNs are kept."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from megatron_ext.ops.backends import NoKernelError
from megatron_ext.ops.gated_norm.kernels import launch_silu_gate
from megatron_ext.ops.triton.kernel_registry import FLOATS, config, kernel

TYPES = [{"T": name} for name in FLOATS]


@kernel(pointers={"T": "x"}, types=TYPES, configs=[config(BLOCK=1024)])
def relu_squared(x, width, BLOCK: tl.constexpr):
    """Compute relu(x)^2 in place; the grid is (rows, blocks of a row)."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place, is_column = x + row * width + column, column < width
    values = tl.load(place, mask=is_column, other=0.0).to(tl.float32)
    values = tl.where(values < 0.0, 0.0, values)
    tl.store(place, (values * values).to(x.dtype.element_ty), mask=is_column)


def _require(x: Tensor) -> None:
    """Raise `NoKernelError` unless a kernel supports this input."""
    if not x.is_contiguous():
        raise NoKernelError("activations have no kernel for tensors that are not contiguous")
    relu_squared.require(T=x.dtype)


def launch_squared_relu_(x: Tensor) -> Tensor:
    _require(x)
    (config,), width = relu_squared.configs, x.shape[-1]
    relu_squared.launch((x.numel() // width, -(-width // config["BLOCK"])), config, x=x, width=width)
    return x


def launch_gated_silu(inner: Tensor, factor: float = 1.0) -> Tensor:
    _require(inner)
    gate, up = inner.view(-1, inner.shape[-1]).chunk(2, dim=-1)
    return launch_silu_gate(up, gate, factor).view(*inner.shape[:-1], up.shape[1])
