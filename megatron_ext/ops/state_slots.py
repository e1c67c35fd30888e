"""Where the states of a step's sequences lie in their pools, and how plain torch reads and writes them.

A pool is one layer's states of one kind, [slots, ...], and written in place. Live states have a slot for each running
request; snapshots have a pool of their own. S sequences of a prefill, R decoding requests, n snapshots.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class SnapshotPlaces:
    """The n states inside a step's prefill that are to be kept, and where to.

    Attributes:
        slots: [n] int64, of the snapshot pool.
        sequences: [n] int64, of the prefill.
        chunks: [n] int64, the kernel chunk that ends there.
        tokens: [n] int64, tokens of the packed prefill up to there.
    """

    slots: Tensor
    sequences: Tensor
    chunks: Tensor
    tokens: Tensor


@dataclass(frozen=True)
class StateSlots:
    """Where S sequences of a prefill have their states.

    Attributes:
        live: [S] int64, the slot that each begins with and leaves its last state in.
        has_initial_state: [S] bool; False starts from zero, whatever the slot holds.
        snapshots: States on the way that are to be kept; None if there are none.
    """

    live: Tensor
    has_initial_state: Tensor
    snapshots: SnapshotPlaces | None = None


def initial_states(pool: Tensor, slots: StateSlots) -> Tensor:
    """[S, ...] in the pool's type; a copy."""
    states = pool[slots.live]
    return states.where(slots.has_initial_state.view(-1, *[1] * (states.dim() - 1)), 0)


def store(pool: Tensor, slots: Tensor | slice, states: Tensor) -> None:
    """Write states to their slots, in the pool's type."""
    pool[slots] = states.to(pool.dtype)
