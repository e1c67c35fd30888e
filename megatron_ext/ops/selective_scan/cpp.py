"""Mamba-1's recurrence in C++, for CPUs: reads and writes slots in place, with the kernels in `kernels.cpp`."""

from __future__ import annotations

from torch import Tensor

from megatron_ext.ops import cpp
from megatron_ext.ops.cpp import decode_places, prefill_places
from megatron_ext.ops.recurrence import RecurrenceBackend
from megatron_ext.ops.selective_scan import reference
from megatron_ext.ops.state_slots import StateSlots
from megatron_ext.ops.varlen import PackedChunks


def prefill(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    chunks: PackedChunks,
    slots: StateSlots,
    live: Tensor,
    snapshots: Tensor | None,
    D: Tensor | None = None,
) -> Tensor:
    """Compute `Recurrence.prefill` for the inputs of `reference.selective_scan`."""
    return cpp.kernels().selective_prefill(u, delta, A, B, C, D, *prefill_places(chunks, slots, live, snapshots))


def decode(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    slots: Tensor | slice,
    live: Tensor,
    D: Tensor | None = None,
) -> Tensor:
    """Compute `Recurrence.decode` for the inputs of `reference.selective_scan_step`."""
    return cpp.kernels().selective_decode(u, delta, A, B, C, D, *decode_places(slots), live)


BACKEND = RecurrenceBackend(
    cpp.NAME, cpp.takes, reference.selective_scan, reference.selective_scan_step, prefill=prefill, decode=decode
)
