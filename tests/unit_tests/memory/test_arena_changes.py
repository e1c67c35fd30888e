"""Changes of an arena before a step: the order in which blocks and states are read and written."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron_ext.config import BatchingConfig
from megatron_ext.errors import RestoreError
from megatron_ext.memory import budget
from megatron_ext.memory.pools import LogProbPool, Pools, allocate_pools
from megatron_ext.memory.step_states import make_changes
from megatron_ext.prefix_cache.slab_layout import SlabLayout
from megatron_ext.prefix_cache.slabs import ArenaChanges, StateCopy
from tests.unit_tests.memory.test_capacity import BOTH, plan_all

CPU = torch.device("cpu")


class Arena:
    """Pools of an arena in which each block and each slot can have a number of its own."""

    def __init__(self) -> None:
        batching = BatchingConfig(max_requests=2, buffer_size_gb=2 / 1024, block_size=16, cuda_graph_impl="local")
        (plan,) = plan_all([BOTH], batching)
        self.layout: SlabLayout = plan.limits.slabs
        self.pools: Pools = allocate_pools(plan, CPU)
        self.pools.kv[:] = torch.nan
        self.restored: list[float] = []

    def write_slot(self, slot: int, number: float, name: bytes = b"") -> None:
        states = self.pools.snapshots
        states.conv[:, slot] = states.ssm[:, slot] = number
        states.close([slot], [name])

    def read_slot(self, slot: int) -> float:
        numbers = {*self.pools.snapshots.conv[:, slot].unique().tolist()}
        assert numbers == {*self.pools.snapshots.ssm[:, slot].unique().tolist()}
        (number,) = numbers
        return number

    def block(self, block: int) -> float:
        (number,) = self.pools.kv[:, :, block].unique().tolist()
        return number

    def restore(self, slot: int, name: bytes) -> None:
        self.pools.snapshots.check([slot], [name])
        self.restored.append(self.read_slot(slot))


@pytest.fixture
def arena(monkeypatch: pytest.MonkeyPatch) -> Arena:
    monkeypatch.setattr(budget, "SHARES_MEMORY", True)
    return Arena()


def nothing() -> None:
    pass


def test_log_probs_move_with_their_blocks(arena: Arena):
    """KV-3, RL-10: all is read before any is written: here two blocks change places, and a third follows."""
    for block in range(3):
        arena.pools.kv[:, :, block] = block
    kept = LogProbPool(torch.empty(arena.layout.blocks, 16), torch.empty(arena.layout.blocks, 8))
    for tensor in kept.tensors:
        tensor[:] = torch.arange(arena.layout.blocks)[:, None]
    pools = dataclasses.replace(arena.pools, log_probs=kept)
    make_changes(pools, ArenaChanges(block_copies=((0, 1), (1, 0), (2, 3))), nothing)
    assert [arena.block(block) for block in range(4)] == [1.0, 0.0, 2.0, 2.0]
    for tensor in kept.tensors:
        assert tensor[:4, -1].tolist() == [1.0, 0.0, 2.0, 2.0]


def test_a_block_is_copied_to_where_a_restored_snapshot_lies(arena: Arena):
    """HY-3: the slab changes its type in the step that resumes from its snapshot, which is then gone."""
    slot, size = 2, arena.layout.blocks_per_slab
    arena.write_slot(slot, 7.0, b"seven")
    arena.pools.kv[:, :, 0] = 5.0
    changes = ArenaChanges((2,), block_copies=((0, 2 * size),))
    make_changes(arena.pools, changes, lambda: arena.restore(slot, b"seven"))
    assert arena.restored == [7.0]
    assert arena.block(2 * size) == 5.0
    with pytest.raises(RestoreError):
        arena.pools.snapshots.check([slot], [b"seven"])


def test_states_that_become_a_snapshot_are_restored_and_overwritten_in_the_same_step(arena: Arena):
    """HY-5: states after drafts take a slot, a request resumes from it, and its slab is freed for blocks."""
    apart, slot, block = arena.layout.first_apart_slot, 3, 3 * arena.layout.blocks_per_slab
    arena.write_slot(apart, 8.0, b"drafted")
    arena.pools.kv[:, :, 0] = 4.0
    changes = ArenaChanges((3,), (StateCopy(b"eight", apart, slot),), ((0, block),))
    make_changes(arena.pools, changes, lambda: arena.restore(slot, b"eight"))
    assert arena.restored == [8.0]
    assert arena.block(block) == 4.0


def test_unfinished_states_become_no_snapshot(arena: Arena):
    apart = arena.layout.first_apart_slot
    arena.write_slot(0, 3.0, b"three")
    with pytest.raises(RestoreError) as caught:
        make_changes(arena.pools, ArenaChanges(state_copies=(StateCopy(b"new", apart, 0),)), nothing)
    assert caught.value.block_hash == b"new"
    assert arena.read_slot(0) == 3.0


def test_states_are_copied_to_where_a_moved_block_lies(arena: Arena):
    """CU-6: the snapshot of a prefill launched ahead gets a slot in a slab whose blocks are moved for it."""
    apart, slot, block = arena.layout.first_apart_slot, 2, 2 * arena.layout.blocks_per_slab
    arena.write_slot(apart, 8.0, b"ahead")
    arena.pools.kv[:, :, block] = 5.0
    make_changes(arena.pools, ArenaChanges((2,), (StateCopy(b"eight", apart, slot),), ((block, 0),)), nothing)
    assert (arena.block(0), arena.read_slot(slot)) == (5.0, 8.0)
    arena.pools.snapshots.check([slot], [b"eight"])
