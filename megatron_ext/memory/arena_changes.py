"""Changes of an arena before a step: blocks and states that are copied to other places, and slabs of another type."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_ext.memory.pools import Pools
from megatron_ext.ops.step_metadata import to_device
from megatron_ext.prefix_cache.slabs import ArenaChanges


def make_changes(pools: Pools, changes: ArenaChanges, restore: Callable[[], None]) -> None:
    """Make the changes that precede a step's writes, around its restores.

    Blocks to copy are read before anything is written, and written after all restores: each may lie where a snapshot
    is that the step restores, or becomes visible.

    Args:
        pools: Pools of an arena.
        changes: Changes that the step's message tells.
        restore: Copies the snapshots that the step restores to running state slots.

    Raises:
        RestoreError: States to be copied are not complete.
    """
    pages, snapshots = pools.pages, pools.snapshots
    assert pages is not None, "only an arena changes"
    assert snapshots is not None, "only an arena changes"
    kept, places = None, None
    if changes.block_copies:
        sources, places = to_device(torch.tensor(changes.block_copies, dtype=torch.int64).T, pages.device)
        kept = pages.index_select(0, sources)
    if changes.state_copies:
        snapshots.copy_within(changes.state_copies)
    restore()
    snapshots.forget_slabs(changes.retyped_slabs, {one.slot for one in changes.state_copies})
    if kept is not None and places is not None:
        pages.index_copy_(0, places, kept)
