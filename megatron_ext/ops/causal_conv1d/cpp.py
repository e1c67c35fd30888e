"""The convolution in C++, for CPUs: slots are read and written in place. `kernels.cpp` beside this file computes."""

from __future__ import annotations

from torch import Tensor

from megatron_ext.ops import cpp
from megatron_ext.ops.causal_conv1d import reference
from megatron_ext.ops.causal_conv1d.operator import ConvolutionBackend
from megatron_ext.ops.cpp.slots import place_of
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
    """As `CausalConv1d.prefill`."""
    kept = slots.snapshots
    places = (None, None, None) if kept is None else (kept.slots, kept.sequences, kept.tokens)
    starts = chunks.sequences.cu_seqlens
    return cpp.kernels().conv_prefill(
        x, weight, bias, starts, slots.live, slots.has_initial_state, live, *places, snapshots
    )


def decode(x: Tensor, weight: Tensor, bias: Tensor | None, *, slots: Tensor | slice, live: Tensor) -> Tensor:
    """As `CausalConv1d.decode`."""
    return cpp.kernels().conv_decode(x, weight, bias, *place_of(slots), live)


BACKEND = ConvolutionBackend(
    cpp.NAME,
    cpp.takes,
    reference.causal_conv1d,
    reference.causal_conv1d_step,
    reference.conv_states_after,
    prefill=prefill,
    decode=decode,
)
