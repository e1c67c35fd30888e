"""Arguments of the C++ kernels for the places of requests' states."""

from __future__ import annotations

from torch import Tensor

from megatron_ext.ops.state_slots import StateSlots
from megatron_ext.ops.varlen import PackedChunks

PrefillPlaces = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def prefill_places(chunks: PackedChunks, slots: StateSlots, live: Tensor, snapshots: Tensor | None) -> PrefillPlaces:
    """Return the members of `Prefill` in `prefill.h`: sequence starts, state slots, and the states to keep."""
    starts, kept = chunks.sequences.cu_seqlens, slots.snapshots
    if kept is None:
        return starts, slots.live, slots.has_initial_state, live, None, None, None, None
    return starts, slots.live, slots.has_initial_state, live, kept.slots, kept.sequences, kept.tokens, snapshots


def decode_places(slots: Tensor | slice) -> tuple[Tensor | None, int]:
    """Return the slots [R] and 0, or None and the first slot if they are consecutive."""
    if isinstance(slots, slice):
        assert slots.step in (None, 1), "one behind the other"
        return None, slots.start or 0
    return slots, 0
