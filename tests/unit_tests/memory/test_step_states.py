"""States around a forward: which copies are made when, and which snapshots can be restored meanwhile."""

from __future__ import annotations

import pytest
import torch

from megatron_ext.errors import RestoreError
from megatron_ext.memory import budget
from megatron_ext.memory.pools import Pools
from megatron_ext.memory.state_pool import SnapshotPool, StatePool, StateShape
from megatron_ext.memory.step_states import StepStates
from megatron_ext.prefix_cache.matching import Restore
from megatron_ext.prefix_cache.slabs import NO_CHANGES, ArenaChanges, StateCopy
from megatron_ext.scheduling.snapshots.snapshot_positions import Snapshot
from megatron_ext.scheduling.step import Sampling, ScheduledChunk, ScheduledStep
from tests.unit_tests.memory.test_arena_changes import Arena

GREEDY = Sampling(0.0, 1, 0.0, None, (), None)
SHAPE = StateShape(2, (3,), (4,), torch.float32, torch.float32)


def chunk(running_slot: int, *slots: int, is_decode: bool = True, **fields: object) -> ScheduledChunk:
    """A chunk that keeps a snapshot in each of the slots, named after it."""
    snapshots = tuple(Snapshot(16, bytes([slot]), slot) for slot in slots)
    return ScheduledChunk(running_slot, (5,), 15, 16, is_decode, (0,), 0, running_slot, snapshots=snapshots, **fields)


def step(*chunks: ScheduledChunk, changes: ArenaChanges = NO_CHANGES) -> ScheduledStep:
    return ScheduledStep(chunks, sum(one.is_decode for one in chunks), changes)


@pytest.fixture
def pools() -> Pools:
    """Running slot i holds 10 + i, snapshot slot i holds i under the name i."""
    live, snapshots = StatePool(SHAPE, 4, torch.device("cpu")), SnapshotPool(SHAPE, 6, torch.device("cpu"))
    for pool, first in ((live, 10.0), (snapshots, 0.0)):
        for states in (pool.conv, pool.ssm):
            states[:] = torch.arange(first, first + states.shape[1])[None, :, None]
    snapshots.close(range(6), [bytes([slot]) for slot in range(6)])
    return Pools(torch.empty(2, 0, 0, 16, 1, 8), live, snapshots)


def numbers(pool: StatePool) -> list[float]:
    assert torch.equal(pool.conv[..., 0], pool.ssm[..., 0])
    return pool.conv[0, :, 0].tolist()


def test_a_slot_is_restored_and_then_written(pools: Pools) -> None:
    """HY-6: the same step may do both; until its end nothing is restored from there."""
    states = StepStates(pools, step(chunk(0, 3, is_decode=False, restore=Restore(b"\3", 3))), at_chunk_ends=True)
    states.restore()
    assert numbers(pools.live_states) == [3, 11, 12, 13]
    assert pools.snapshots._contents[3] is None
    pools.live_states.conv[:, 0] = pools.live_states.ssm[:, 0] = 30.0  # the forward
    states.keep()
    assert numbers(pools.snapshots) == [0, 1, 2, 30, 4, 5]
    assert pools.snapshots._contents[3] == b"\3"


def test_states_that_mixers_write_are_not_copied(pools: Pools) -> None:
    """HY-9: those inside a prefill and after drafts; the end of a decode is the running state."""
    drafted = chunk(2, 5, is_decode=False, target_sampling=(GREEDY,))
    kept, found = step(chunk(0, 3), chunk(1, 4, is_decode=False), drafted), {}
    for at_chunk_ends in (False, True):
        found[at_chunk_ends] = StepStates(pools, kept, at_chunk_ends=at_chunk_ends).take(9)[1]
    assert found == {False: [(0, 3)], True: [(0, 3), (1, 4)]}


def test_a_captured_forward_takes_copies(pools: Pools) -> None:
    """CU-4: all restores and as many copies as its graph has room for; the rest is copied after it."""
    decodes, resuming = [chunk(slot, slot) for slot in range(3)], chunk(3, is_decode=False, restore=Restore(b"\4", 4))
    states = StepStates(pools, step(*decodes, resuming), at_chunk_ends=False)
    assert states.take(2) == ([(4, 3)], [(0, 0), (1, 1)])
    states.keep()
    assert numbers(pools.live_states) == [10, 11, 12, 13], "the graph restores"
    assert numbers(pools.snapshots) == [0, 1, 12, 3, 4, 5]
    assert pools.snapshots._contents[:3] == [b"\0", b"\1", b"\2"]


@pytest.mark.parametrize("is_captured", [False, True])
def test_another_snapshot_is_refused(pools: Pools, is_captured: bool) -> None:
    """HY-6: before anything is written."""
    states = StepStates(pools, step(chunk(0, 2, restore=Restore(b"other", 3))), at_chunk_ends=False)
    with pytest.raises(RestoreError):
        states.take(1) if is_captured else states.restore()
    assert numbers(pools.live_states) == [10, 11, 12, 13]
    assert pools.snapshots._contents[2] == b"\2"


@pytest.mark.parametrize("is_captured", [False, True])
def test_changes_come_first(monkeypatch: pytest.MonkeyPatch, is_captured: bool) -> None:
    """KV-3, HY-6: states that become a snapshot are restored from it; the slot is written anew, and so is a block."""
    monkeypatch.setattr(budget, "SHARES_MEMORY", True)
    arena = Arena()
    live, snapshots = arena.pools.live_states, arena.pools.snapshots
    apart, new, other, size = arena.layout.first_apart_slot, 1, 2, arena.layout.blocks_per_slab
    arena.write_slot(apart, 7.0, b"seven")
    arena.pools.kv[:, :, 0] = 4.0
    changes = ArenaChanges((), (StateCopy(b"seven", apart, new),), ((0, 3 * size),))
    resuming = chunk(0, other, is_decode=False, restore=Restore(b"seven", new))
    states = StepStates(arena.pools, step(resuming, changes=changes), at_chunk_ends=True)
    if is_captured:
        assert states.take(9) == ([], [(0, other)]), "restores have been made among the changes"
    else:
        states.restore()
    assert live.conv[:, 0].unique().tolist() == [7]
    assert arena.block(3 * size) == 4
    assert snapshots._contents[new : other + 1] == [b"seven", None]
