"""State slots of a step's sequences, and their reads and writes in plain torch.

A pool holds one layer's states of one kind, [slots, ...], and is written in place. Running states have a slot for each
running request; snapshots have a separate pool. S sequences of a prefill, R decoding requests, n snapshots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from megatron_ext.ops.varlen import PackedChunks


@dataclass(frozen=True)
class SnapshotPlaces:
    """States inside a step's prefill to keep, n of them, and their snapshot slots.

    Entries are ordered by sequence, then by tokens, which several may share. Entries from `offsets[S]` on are padding:
    kernels do not read them, and plain torch writes some state to their slots.

    Attributes:
        slots: [n] int64, slot in the snapshot pool.
        offsets: [S + 1] int64; entries `offsets[i]` to `offsets[i + 1]` belong to sequence i.
        chunks: [n] int64, kernel chunk that ends at the state.
        tokens: [n] int64, tokens of the packed prefill before the state, more than before its sequence.
    """

    slots: Tensor
    offsets: Tensor
    chunks: Tensor
    tokens: Tensor


@dataclass(frozen=True)
class StateSlots:
    """State slots of S sequences of a prefill.

    Attributes:
        live: [S] int64, running state slot of each sequence, read for its initial state and written with its final
            state.
        has_initial_state: [S] bool; False starts from zero, whatever the slot holds.
        snapshots: States inside the prefill to keep; None if there are no such states.
    """

    live: Tensor
    has_initial_state: Tensor
    snapshots: SnapshotPlaces | None = None


class PrefillStates(NamedTuple):
    """Sequences of a prefill and the pools of their states.

    Attributes:
        chunks: Places of sequences and kernel chunks on the token axis.
        slots: State slots of the sequences.
        live: Running states, [slots, ...], written in place; every initial state is read before it (HY-8).
        snapshots: [slots, ...], written in place; not needed if `slots` keeps nothing.
    """

    chunks: PackedChunks
    slots: StateSlots
    live: Tensor
    snapshots: Tensor | None


class DecodeStates(NamedTuple):
    """Running states of R requests that decode one token each.

    Attributes:
        slots: [R] int64, or a slice if consecutive, so that states are views.
        live: Running states, [slots, ...], written in place.
    """

    slots: Tensor | slice
    live: Tensor


def initial_states(pool: Tensor, slots: StateSlots) -> Tensor:
    """Return a copy of the initial states, [S, ...] in the pool's type."""
    states = pool[slots.live]
    return states.where(slots.has_initial_state.view(-1, *[1] * (states.dim() - 1)), 0)


def store(pool: Tensor, slots: Tensor | slice, states: Tensor) -> None:
    """Write states to their slots, in the pool's type."""
    pool[slots] = states.to(pool.dtype)
