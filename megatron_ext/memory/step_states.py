"""States around the forward of a step: restored snapshots before it, kept snapshots and states of forks after it.

An arena changes before a step, too: blocks and states are copied to other places, and slabs get another type.

All forwards, eager and captured, of the model and of layers that draft, follow this one protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from megatron_ext.memory.pools import Pools
from megatron_ext.memory.state_pool import copy_states
from megatron_ext.ops.varlen import to_device
from megatron_ext.prefix_cache.slabs import NO_CHANGES, ArenaChanges
from megatron_ext.scheduling.step import ScheduledChunk, ScheduledStep

RowPairs = Sequence[tuple[int, int]]
"""Copies of states between two pools, as (source row, target row)."""


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


class StepStates:
    """States that one step resumes from and keeps: first `restore` or `take`, then the forward, then `keep`.

    From the first call to `keep`, the snapshots that the step writes are incomplete, and no restore accepts them.

    Args:
        pools: Pools of this rank, whose arena is changed as the step says.
        step: The step.
        at_chunk_ends: Whether prefills keep states only where a chunk ends; else their mixers write snapshots inside.

    Raises:
        RestoreError: A slot does not hold the snapshot that a copy or a request needs.
    """

    def __init__(self, pools: Pools, step: ScheduledStep, *, at_chunk_ends: bool) -> None:
        self._pools, self._forks = pools, step.forks
        self._restored = [(chunk.restore, chunk.running_slot) for chunk in step.chunks if chunk.restore is not None]
        taken = [(chunk, one) for chunk in step.chunks for one in chunk.snapshots]
        self._written = [one for _, one in taken]
        # The mixers write snapshots inside a prefill and after drafts; other chunks leave theirs in the running slot.
        self._copies = [
            (chunk.running_slot, one.slot)
            for chunk, one in taken
            if chunk.is_decode or (at_chunk_ends and not chunk.target_sampling)
        ]
        if step.changes != NO_CHANGES:
            make_changes(pools, step.changes, self._restore)  # in the middle: some copies are needed by restores

    def restore(self) -> None:
        """Copy the snapshots that the step resumes from to running slots; mark the ones it writes as incomplete."""
        self._restore()
        self._open()

    def take(self, copies: int) -> tuple[RowPairs, RowPairs]:
        """Return the copies that a captured forward makes instead of this object; otherwise as `restore`.

        Args:
            copies: Maximum number of running states that the forward copies.

        Returns:
            Restores, as (snapshot slot, running slot), and copies after the layers, as (running slot, snapshot slot).
        """
        restores: RowPairs = [(one.slot, slot) for one, slot in self._restored]
        if self._pools.snapshots is not None:
            self._pools.snapshots.check(*self._names())
        self._open()
        taken, self._copies = self._copies[:copies], self._copies[copies:]
        return restores, taken

    def keep(self) -> None:
        """Copy running states to the snapshots that no mixer has written, complete all snapshots, and copy forks."""
        live, snapshots = self._pools.live_states, self._pools.snapshots
        if live is not None and snapshots is not None and self._written:
            if self._copies:
                running_slots, slots = zip(*self._copies, strict=True)
                copy_states(live, running_slots, snapshots, slots)
            snapshots.close([one.slot for one in self._written], [one.block_hash for one in self._written])
        copy_forks(self._pools, self._forks)

    def _names(self) -> tuple[list[int], list[bytes]]:
        return [one.slot for one, _ in self._restored], [one.block_hash for one, _ in self._restored]

    def _restore(self) -> None:
        live, snapshots = self._pools.live_states, self._pools.snapshots
        if live is not None and snapshots is not None and self._restored:
            snapshots.restore(*self._names(), live, [slot for _, slot in self._restored])
        self._restored = []

    def _open(self) -> None:
        """Mark what the step writes, after all restores: a slot may be restored and written by the same step."""
        if self._pools.snapshots is not None:
            self._pools.snapshots.open([one.slot for one in self._written])


def copy_forks(pools: Pools, forks: Sequence[ScheduledChunk]) -> None:
    """Copy the partial blocks and running states that forks take over from their sources, all at once."""
    taken = [(one.source, one.running_slot) for one in forks if one.source is not None]
    copies = [source.block_copy for source, _ in taken if source.block_copy is not None]
    kv, live = pools.kv, pools.live_states
    if copies and kv.shape[1]:  # this stage has attention layers
        sources, targets = to_device(torch.tensor(copies, dtype=torch.int64).T.contiguous(), kv.device)
        kv.index_copy_(2, targets, kv.index_select(2, sources))
    if taken and live is not None:
        copy_states(live, [source.running_slot for source, _ in taken], live, [slot for _, slot in taken])
