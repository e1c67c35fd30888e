"""Convolution in C++, for CPUs: reads and writes slots in place, with the kernels in `kernels.cpp`."""

from __future__ import annotations

from torch import Tensor

from megatron_ext.ops import cpp
from megatron_ext.ops.causal_conv1d import reference
from megatron_ext.ops.causal_conv1d.operator import ConvolutionBackend
from megatron_ext.ops.cpp import decode_places, prefill_places
from megatron_ext.ops.state_slots import StateSlots
from megatron_ext.ops.varlen import PackedChunks


def prefill(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    chunks: PackedChunks,
    slots: StateSlots,
    live: Tensor,
    snapshots: Tensor | None,
) -> Tensor:
    """Compute `CausalConv1d.prefill`."""
    return cpp.kernels().conv_prefill(x, weight, bias, *prefill_places(chunks, slots, live, snapshots))


def decode(x: Tensor, weight: Tensor, bias: Tensor | None, *, slots: Tensor | slice, live: Tensor) -> Tensor:
    """Compute `CausalConv1d.decode`."""
    return cpp.kernels().conv_decode(x, weight, bias, *decode_places(slots), live)


BACKEND = ConvolutionBackend(
    cpp.NAME,
    cpp.takes,
    reference.causal_conv1d,
    reference.causal_conv1d_step,
    reference.conv_states_after,
    prefill=prefill,
    decode=decode,
)
