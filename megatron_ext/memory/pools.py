"""Device pools: KV blocks, kept log-probs, running states, snapshots; their contents may wait in host memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_ext.memory.budget import GIB, KVCacheConfig
from megatron_ext.memory.engine_plan import EnginePlan, ModelShape
from megatron_ext.memory.fitting import largest_allocation
from megatron_ext.memory.host_limits import allocating
from megatron_ext.memory.state_pool import SnapshotPool, StatePool
from megatron_ext.prefix_cache.slab_layout import SlabLayout


@dataclass(frozen=True)
class LogProbPool:
    """Log-probs of the tokens of every block, and hidden states at their ends, on the stage with the output layer.

    Attributes:
        values: Log-prob of each token of a block, [blocks, B] fp32; undefined for the first token of a sequence.
        hidden_states: Input of the output layer at the last token of a block, [blocks, h].
    """

    values: Tensor
    hidden_states: Tensor

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """All memory of the pool; each tensor has a row for each block."""
        return self.values, self.hidden_states


@dataclass(frozen=True)
class Pools:
    """Pools of everything that requests keep on the device.

    Attributes:
        kv: Keys and values, [2, layers, blocks + 1, B, KV heads, D]; the last block is the dummy. Blocks are dense
            by layer, or in an arena page first: there the memory of a block has all layers.
        live_states: Running state slots, one per request; None without recurrent layers.
        snapshots: Snapshot slots, followed by those for states after drafts; None without recurrent layers.
        pages: Memory of the blocks of an arena, which they share with snapshots, [blocks, bytes] uint8; else None.
        log_probs: Log-probs kept with blocks; None if none are kept, or on a stage without the output layer.
    """

    kv: Tensor
    live_states: StatePool | None
    snapshots: SnapshotPool | None
    pages: Tensor | None = None
    log_probs: LogProbPool | None = None


def allocate_pools(plan: EnginePlan, device: torch.device) -> Pools:
    """Allocate the pools, uninitialised.

    Raises:
        ConfigError: The allocation failed; the error names settings that would fit.
    """
    geometry, shape, count = plan.geometry, plan.shape, plan.geometry.pool_bytes
    purpose = f"KV blocks, live states and snapshots of {count / GIB:.2f} GB"
    with allocating(purpose, lambda: plan.advice(largest_allocation(device, count))):
        pools = _allocate(plan, device)
        if not geometry.log_prob_bytes:
            return pools
        values = torch.empty((geometry.blocks, geometry.block_size_tokens), dtype=torch.float32, device=device)
        states = torch.empty((geometry.blocks, shape.output_channels), dtype=shape.dtype, device=device)
        return replace(pools, log_probs=LogProbPool(values, states))


def _allocate(plan: EnginePlan, device: torch.device) -> Pools:
    shape, geometry = plan.shape, plan.geometry
    live = None
    if shape.states is not None:
        live = StatePool(shape.states, plan.limits.max_requests + plan.spare_slots, device)
    if geometry.slabs is not None:
        return _share_arena(shape, geometry, geometry.slabs, live, device)
    blocks = geometry.blocks + 1 if shape.attention_layers else 0
    size = (2, shape.attention_layers, blocks, geometry.block_size_tokens, shape.kv_heads, shape.head_channels)
    kv = torch.empty(size, dtype=shape.dtype, device=device)
    if shape.states is None:
        return Pools(kv, None, None)
    slots = geometry.snapshot_slots + geometry.draft_states + plan.spare_slots + plan.limits.async_states
    return Pools(kv, live, SnapshotPool(shape.states, slots, device))


def _share_arena(
    shape: ModelShape, geometry: KVCacheConfig, layout: SlabLayout, live: StatePool | None, device: torch.device
) -> Pools:
    """Allocate an arena, and views of it as blocks and as snapshots, each over all slabs."""
    assert shape.states is not None, "only states share memory with blocks"
    slots = layout.first_apart_slot + geometry.apart_slots
    arena = torch.empty((slots, geometry.snapshot_bytes), dtype=torch.uint8, device=device)
    kv = _page_first(arena, shape, layout.blocks + 1, geometry.cached_block_bytes, geometry.block_size_tokens)
    pages = arena.flatten()[: layout.blocks * geometry.cached_block_bytes].view(layout.blocks, -1)
    return Pools(kv, live, SnapshotPool(shape.states, slots, device, arena), pages)


def _page_first(memory: Tensor, shape: ModelShape, blocks: int, block_bytes: int, block_size: int) -> Tensor:
    """Return a view [2, layers, blocks, B, KV heads, D] of memory in which a block begins every `block_bytes`."""
    elements = memory.flatten().view(shape.dtype)
    heads = shape.kv_heads * shape.head_channels
    layer = block_size * heads  # elements of one layer's keys, or values, of a block
    size = (2, shape.attention_layers, blocks, block_size, shape.kv_heads, shape.head_channels)
    strides = (layer, 2 * layer, block_bytes // shape.dtype.itemsize, heads, shape.head_channels, 1)
    return elements.as_strided(size, strides)


class OffloadedPools:
    """Contents of pools in host memory; making it frees the memory of the pools, whose tensors have none until then.

    Pools are moved one after the other, so that on CPUs, too, only the largest is in memory twice.

    Args:
        pools: Allocated pools.

    Raises:
        RuntimeError: The host has too little memory. The pools are as they were.
    """

    def __init__(self, pools: Pools) -> None:
        self._waiting: list[tuple[Tensor, Tensor]] = []  # a tensor over the whole memory of a pool, and its contents
        try:
            for tensor in _tensors(pools):
                self._move(tensor)
        except (MemoryError, RuntimeError):
            self.restore()
            raise

    def _move(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.nbytes():  # blocks and snapshots of an arena share their memory
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            self._waiting.append((whole, whole.to("cpu", copy=True)))
            storage.resize_(0)

    def restore(self) -> None:
        """Allocate the memory of the pools again, and write their contents back.

        Raises:
            RuntimeError: There is too little memory. Another call continues with the tensors that are left.
        """
        while self._waiting:
            whole, contents = self._waiting[-1]
            whole.untyped_storage().resize_(len(contents))
            whole.copy_(contents)
            self._waiting.pop()


def _tensors(pools: Pools) -> list[Tensor]:
    states = [one for one in (pools.live_states, pools.snapshots) if one is not None]
    kept = () if pools.log_probs is None else pools.log_probs.tensors
    return [pools.kv, *kept, *(tensor for one in states for tensor in (one.conv, one.ssm))]
