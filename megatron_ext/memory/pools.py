"""Device pools: KV blocks, running states, snapshots."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ext.memory.budget import GIB
from megatron_ext.memory.engine_plan import EnginePlan
from megatron_ext.memory.fitting import largest_allocation
from megatron_ext.memory.host_limits import allocating
from megatron_ext.memory.state_pool import SnapshotPool, StatePool


@dataclass(frozen=True)
class Pools:
    """Pools of everything that requests keep on the device.

    Attributes:
        kv: Keys and values, [2, layers, blocks + 1, B, KV heads, D]; the last block is the dummy.
        live_states: Running state slots, one per request; None without recurrent layers.
        snapshots: Snapshot slots, followed by those for states after drafts; None without recurrent layers.
    """

    kv: Tensor
    live_states: StatePool | None
    snapshots: SnapshotPool | None


def allocate_pools(plan: EnginePlan, device: torch.device) -> Pools:
    """Allocate the pools, uninitialised.

    Raises:
        ConfigError: The allocation failed; the error names settings that would fit.
    """
    count = plan.geometry.pool_bytes
    purpose = f"KV blocks, live states and snapshots of {count / GIB:.2f} GB"
    with allocating(purpose, lambda: plan.advice(largest_allocation(device, count))):
        return _allocate(plan, device)


def _allocate(plan: EnginePlan, device: torch.device) -> Pools:
    shape, geometry = plan.shape, plan.geometry
    blocks = geometry.blocks + 1 if shape.attention_layers else 0
    size = (2, shape.attention_layers, blocks, geometry.block_size_tokens, shape.kv_heads, shape.head_channels)
    kv = torch.empty(size, dtype=shape.dtype, device=device)
    if shape.states is None:
        return Pools(kv, None, None)
    live = StatePool(shape.states, plan.limits.max_requests + plan.spare_slots, device)
    slots = geometry.snapshot_slots + geometry.draft_states + plan.spare_slots + plan.limits.async_states
    return Pools(kv, live, SnapshotPool(shape.states, slots, device))
