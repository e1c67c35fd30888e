"""Changes of an arena before a step: blocks and states that are copied to other places, and slabs of another type."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron_ext.memory.pools import Pools
from megatron_ext.ops.step_metadata import to_device
from megatron_ext.prefix_cache.slabs import ArenaChanges


def make_changes(pools: Pools, changes: ArenaChanges, restore: Callable[[], None]) -> None:
    """Make the changes that precede a step's writes, around its restores; see `ArenaChanges` for their order.

    Args:
        pools: Pools of an arena.
        changes: Changes that the step's message tells.
        restore: Copies the snapshots that the step restores to running state slots.

    Raises:
        RestoreError: States to be copied are not complete, or `restore` raises it.
    """
    pages, snapshots = pools.pages, pools.snapshots
    assert pages is not None, "only an arena changes"
    assert snapshots is not None, "only an arena changes"
    beside = () if pools.log_probs is None else pools.log_probs.tensors
    writes = [_read(memory, changes.block_copies) for memory in (pages, *beside)]
    if changes.state_copies:  # perhaps to places of these blocks
        snapshots.copy_within(changes.state_copies)
    restore()
    writes.append(_read(snapshots.records, changes.snapshot_copies))
    moved = snapshots.names([source for source, _ in changes.snapshot_copies])
    snapshots.open([source for source, _ in changes.snapshot_copies])
    snapshots.forget_slabs(changes.retyped_slabs, {one.slot for one in changes.state_copies})
    for write in writes:
        write()
    snapshots.rename([slot for _, slot in changes.snapshot_copies], moved)


def _read(memory: Tensor, copies: Sequence[tuple[int, int]]) -> Callable[[], None]:
    """Read the sources of copies between rows of `memory`, [rows, bytes]; return a function that writes them."""
    if not copies:
        return lambda: None
    sources, destinations = to_device(torch.tensor(copies, dtype=torch.int64).T.contiguous(), memory.device)
    kept = memory.index_select(0, sources)
    return lambda: _write(memory, destinations, kept)


def _write(memory: Tensor, rows: Tensor, contents: Tensor) -> None:
    memory.index_copy_(0, rows, contents)
