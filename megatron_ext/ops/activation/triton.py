"""MLP activations in Triton, for CUDA devices: one launch each, with the kernels in `kernels.py`."""

from __future__ import annotations

from torch import Tensor

from megatron_ext.ops import triton
from megatron_ext.ops.activation import reference
from megatron_ext.ops.activation.reference import ActivationBackend
from megatron_ext.ops.triton.launching import say_reference_computes


def _lacks(x: Tensor) -> str | None:
    """Return why there is no kernel for this input; None if there is one."""
    from megatron_ext.ops.activation import kernels

    if not x.is_contiguous():
        return "activations have no kernel for tensors that are not contiguous"
    return kernels.relu_squared.lacks(T=x.dtype)


def squared_relu(x: Tensor) -> Tensor:
    lack = _lacks(x)
    if lack is not None:
        say_reference_computes(lack)
        return reference.squared_relu(x)
    from megatron_ext.ops.activation import kernels

    (config,), width = kernels.relu_squared.configs, x.shape[-1]
    kernels.relu_squared.launch((x.numel() // width, -(-width // config["BLOCK"])), config, x=x, width=width)
    return x


def gated_silu(inner: Tensor, factor: float) -> Tensor:
    lack = _lacks(inner)
    if lack is not None:
        say_reference_computes(lack)
        return reference.gated_silu(inner, factor)
    from megatron_ext.ops.activation import kernels

    (config,), width = kernels.silu_times.configs, inner.shape[-1] // 2
    y = inner.new_empty(*inner.shape[:-1], width)
    rows = y.numel() // width
    kernels.silu_times.launch(
        (rows, -(-width // config["BLOCK"])), config, inner=inner, y=y, width=width, factor=factor
    )
    return y


BACKEND = ActivationBackend(triton.NAME, triton.takes, squared_relu, gated_silu)
