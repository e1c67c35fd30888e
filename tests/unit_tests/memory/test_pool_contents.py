"""Contents of pools: copied for forks, compared by audits, and moved to host memory and back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_ext.memory.entry_memory import BOUNDS, compare_entries
from megatron_ext.memory.pools import LogProbPool, OffloadedPools, Pools
from megatron_ext.memory.state_pool import SnapshotPool, StatePool, StateShape
from megatron_ext.memory.step_states import copy_forks
from megatron_ext.scheduling.audit import Comparison
from megatron_ext.scheduling.step import ForkSource, ScheduledChunk

CPU = torch.device("cpu")
SHAPE = StateShape(layers=2, conv=(3, 2), ssm=(2, 3), conv_dtype=torch.float32, ssm_dtype=torch.float32)


def pools() -> Pools:
    """Pools of 4 blocks of 3 tokens and 3 slots; no tensor has a number twice."""
    kept = LogProbPool(torch.empty(4, 3), torch.empty(4, 2))
    made = Pools(torch.empty(2, 2, 4, 3, 1, 2), StatePool(SHAPE, 3, CPU), SnapshotPool(SHAPE, 3, CPU), log_probs=kept)
    for tensor in tensors(made):
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape))
    return made


def tensors(of: Pools) -> list[Tensor]:
    states = [tensor for one in (of.live_states, of.snapshots) for tensor in (one.conv, one.ssm)]
    return [of.kv, *states, of.log_probs.values, of.log_probs.hidden_states]


def test_a_fork_has_the_partial_block_and_the_states_of_its_source():
    """KV-6: a sample that took over a prompt would go on from what another request has left there."""
    after, before = pools(), pools()
    forks = [
        ScheduledChunk(request, (), 8, 8, False, (), 6, slot, source=ForkSource(1, 0, copy))
        for request, slot, copy in ((2, 2, (1, 3)), (3, 1, None))
    ]
    copy_forks(after, forks)
    assert torch.equal(after.kv, before.kv[:, :, [0, 1, 2, 1]])
    assert torch.equal(after.live_states.conv, before.live_states.conv[:, [0, 0, 0]])
    assert torch.equal(after.live_states.ssm, before.live_states.ssm[:, [0, 0, 0]])


@pytest.mark.parametrize("part", [0, 1], ids=["keys", "values"])
@pytest.mark.parametrize("value", [3.0, torch.nan])
def test_an_audit_sees_one_wrong_number_of_a_block(part: int, value: float):
    """EX-15: in keys as in values, and what is no number at all."""
    compared = pools()
    compared.kv[:, :, 2:] = compared.kv[:, :, :2]
    compared.kv[part, 1, 3, 2, 0, 1] += value
    found = compare_entries(compared, Comparison(0, ((0, 2), (1, 3)), None, True), torch.float32)
    assert [one > BOUNDS[torch.float32] for one in found.blocks] == [False, True]


def test_offloaded_pools_come_back_as_they_were():
    """RL-6, RL-10: blocks, states, snapshots and log-probs; until then they take no memory."""
    moved = pools()
    offloaded = OffloadedPools(moved)
    assert {one.untyped_storage().nbytes() for one in tensors(moved)} == {0}
    offloaded.restore()
    assert all(map(torch.equal, tensors(moved), tensors(pools())))
