"""MLP activations in Triton, for CUDA devices: one launch each, with the kernels in `kernels.py`."""

from __future__ import annotations

from torch import Tensor

from megatron_ext.ops import triton
from megatron_ext.ops.activation.reference import ActivationBackend
from megatron_ext.ops.backends import NoKernelError


def _require(x: Tensor) -> None:
    """Raise `NoKernelError` unless a kernel supports this input."""
    from megatron_ext.ops.activation import kernels

    if not x.is_contiguous():
        raise NoKernelError("activations have no kernel for tensors that are not contiguous")
    kernels.relu_squared.require(T=x.dtype)


def squared_relu(x: Tensor) -> Tensor:
    _require(x)
    from megatron_ext.ops.activation import kernels

    (config,), width = kernels.relu_squared.configs, x.shape[-1]
    kernels.relu_squared.launch((x.numel() // width, -(-width // config["BLOCK"])), config, x=x, width=width)
    return x


def gated_silu(inner: Tensor, factor: float) -> Tensor:
    _require(inner)
    from megatron_ext.ops.activation import kernels

    (config,), width = kernels.silu_times.configs, inner.shape[-1] // 2
    y = inner.new_empty(*inner.shape[:-1], width)
    grid = y.numel() // width, -(-width // config["BLOCK"])
    kernels.silu_times.launch(grid, config, inner=inner, y=y, width=width, factor=factor)
    return y


BACKEND = ActivationBackend(triton.NAME, triton.takes, squared_relu, gated_silu)
