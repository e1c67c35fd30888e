"""Reservation of slots for the snapshots of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron_ext.prefix_cache.snapshot_order import Rank
from megatron_ext.prefix_cache.state_index import SlotId, StateIndex
from megatron_ext.scheduling.plan import SnapshotRequest
from megatron_ext.scheduling.snapshots.snapshot_positions import Snapshot

Placing = Callable[[SnapshotRequest, SlotId], SlotId]


def reserve_snapshots(wanted: Sequence[SnapshotRequest], states: StateIndex, place: Placing | None = None) -> None:
    """Reserve slots for the snapshots of a step, all at once; snapshots without a slot are left out.

    Args:
        wanted: Snapshots in order of priority.
        states: Index of the slots.
        place: Returns the slot in which a snapshot is written, given the reserved one; None for the reserved one.
    """
    for one, reserved in zip(wanted, states.reserve_all(wanted), strict=True):
        if reserved is None:
            continue
        sequence, slot = one.request.sequence, reserved if place is None else place(one, reserved)
        sequence.snapshots.append(Snapshot(one.position, one.block_hash, slot))
        if one.is_optional:
            sequence.snapshot_plan.decode = one.block_hash
        elif one.rank is Rank.ORDINARY:
            sequence.snapshot_plan.used.append(one.block_hash)
