"""Copies for forks: the partial block and the running states of a request, for other samples of its prompt."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_ext.memory.pools import Pools
from megatron_ext.memory.state_pool import copy_states
from megatron_ext.ops.step_metadata import to_device
from megatron_ext.scheduling.step import ScheduledChunk


def copy_forks(pools: Pools, forks: Sequence[ScheduledChunk]) -> None:
    """Copy what the forks of a step take over from their sources, after the forward; all at once."""
    taken = [(one.source, one.running_slot) for one in forks if one.source is not None]
    copies = [source.block_copy for source, _ in taken if source.block_copy is not None]
    kv, live = pools.kv, pools.live_states
    if copies and kv.shape[1]:  # this stage has attention layers
        sources, targets = to_device(torch.tensor(copies, dtype=torch.int64).T.contiguous(), kv.device)
        kv.index_copy_(2, targets, kv.index_select(2, sources))
    if forks and live is not None:
        copy_states(live, [source.running_slot for source, _ in taken], live, [slot for _, slot in taken])
