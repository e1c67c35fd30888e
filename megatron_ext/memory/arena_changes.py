"""Changes of an arena before a step: blocks and states that are copied to other places, and slabs of another type."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

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
    writes = [_read(memory, changes.block_copies) for memory in (pages.view(torch.int64), *beside)]  # wide: copied fast
    if changes.state_copies:  # perhaps to places of these blocks
        snapshots.copy_within(changes.state_copies)
    restore()
    snapshots.forget_slabs(changes.retyped_slabs, {one.slot for one in changes.state_copies})
    for write in writes:
        write()


def _read(memory: Tensor, copies: Sequence[tuple[int, int]]) -> Callable[[], object]:
    """Read the sources of copies between rows of `memory`, [rows, elements]; return a function that writes them."""
    if not copies:
        return lambda: None
    sources, destinations = to_device(torch.tensor(copies, dtype=torch.int64).T.contiguous(), memory.device)
    return partial(memory.index_copy_, 0, destinations, memory.index_select(0, sources))
