"""Gated delta rule in C++, for CPUs: reads and writes slots in place, with the kernels in `kernels.cpp`."""

from __future__ import annotations

from torch import Tensor

from megatron_ext.ops import cpp
from megatron_ext.ops.cpp import decode_places, prefill_places
from megatron_ext.ops.gated_delta_rule import reference
from megatron_ext.ops.recurrence import RecurrenceBackend
from megatron_ext.ops.state_slots import StateSlots
from megatron_ext.ops.varlen import PackedChunks


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    chunks: PackedChunks,
    slots: StateSlots,
    live: Tensor,
    snapshots: Tensor | None,
    normalize: bool = False,
) -> Tensor:
    """Compute `Recurrence.prefill` for the inputs of `reference.gated_delta_scan`."""
    return cpp.kernels().gated_delta_prefill(
        q, k, v, g, beta, normalize, *prefill_places(chunks, slots, live, snapshots)
    )


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    slots: Tensor | slice,
    live: Tensor,
    normalize: bool = False,
) -> Tensor:
    """Compute `Recurrence.decode` for the inputs of `reference.gated_delta_step`."""
    return cpp.kernels().gated_delta_decode(q, k, v, g, beta, normalize, *decode_places(slots), live)


BACKEND = RecurrenceBackend(
    cpp.NAME, cpp.takes, reference.gated_delta_scan, reference.gated_delta_step, prefill=prefill, decode=decode
)
