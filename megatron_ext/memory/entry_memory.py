"""Cached entries, blocks and snapshots: as bytes on the host, and compared with an audit's recomputation of them.

The order of the bytes does not depend on how the pools are laid out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from megatron_ext.memory.pools import Pools
from megatron_ext.memory.step_states import make_changes
from megatron_ext.ops.varlen import to_device
from megatron_ext.prefix_cache.block_pool import BlockId
from megatron_ext.prefix_cache.disk.entry import Buffer
from megatron_ext.prefix_cache.disk.warm_restart import EntryMemory
from megatron_ext.prefix_cache.hash_chain import BlockHash
from megatron_ext.prefix_cache.slabs import ArenaChanges
from megatron_ext.prefix_cache.state_index import SlotId
from megatron_ext.scheduling.audit import Comparison, Differences

# Relative to the largest value of a layer: what other chunks, another order of sums and decoding may change.
BOUNDS = {torch.float32: 1e-4, torch.float16: 2**-6, torch.bfloat16: 2**-4}
_MAX_BYTES = 64 * 2**20  # of blocks that are compared at once


class PoolEntries(EntryMemory):
    """Blocks and snapshots of the pools as bytes: K/V [2, L, B, KV heads, D]; conv [L, Cn, K-1], then ssm [L, ...].

    Args:
        pools: Returns the pools, which may be allocated anew.
    """

    def __init__(self, pools: Callable[[], Pools]) -> None:
        self._pools = pools

    def _block(self, block: BlockId) -> list[Tensor]:
        kv = self._pools().kv
        return [kv[:, :, block]] if kv.numel() else []

    def _snapshot(self, slot: SlotId) -> list[Tensor]:
        pool = self._pools().snapshots
        if pool is None:  # no recurrent layer is on this rank
            return []
        return [states for states in (pool.conv[:, slot], pool.ssm[:, slot]) if states.numel()]

    def block_buffers(self) -> list[bytearray]:
        """Return buffers for the bytes of a block; none if no layer has keys and values."""
        return _buffers(self._block(BlockId(0)))

    def snapshot_buffers(self) -> list[bytearray]:
        """Return buffers for the bytes of a snapshot; none if no layer is recurrent."""
        return _buffers(self._snapshot(SlotId(0)))

    def read_block(self, block: BlockId) -> list[Buffer]:
        """Return a copy of the bytes of a block."""
        return [_bytes_of(tensor) for tensor in self._block(block)]

    def write_block(self, block: BlockId, buffers: Sequence[Buffer]) -> None:
        """Write a block."""
        _write(self._block(block), buffers)

    def read_snapshot(self, slot: SlotId) -> list[Buffer]:
        """Return a copy of the bytes of a snapshot."""
        return [_bytes_of(tensor) for tensor in self._snapshot(slot)]

    def write_snapshot(self, slot: SlotId, block_hash: BlockHash, buffers: Sequence[Buffer]) -> None:
        """Write a snapshot to a slot that is undefined, complete in all layers, and name it."""
        _write(self._snapshot(slot), buffers)
        snapshots = self._pools().snapshots
        if snapshots is not None:
            snapshots.close([slot], [block_hash])

    def make_changes(self, changes: ArenaChanges) -> None:
        """Make changes of an arena that no step's message has told."""
        make_changes(self._pools(), changes, lambda: None)


def _buffers(tensors: Sequence[Tensor]) -> list[bytearray]:
    return [bytearray(tensor.numel() * tensor.element_size()) for tensor in tensors]


def _bytes_of(tensor: Tensor) -> memoryview:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype)
    copy.copy_(tensor.detach())
    return copy.flatten().view(torch.uint8).numpy().data


def _write(tensors: Sequence[Tensor], buffers: Sequence[Buffer]) -> None:
    for tensor, buffer in zip(tensors, buffers, strict=True):
        tensor.copy_(torch.frombuffer(buffer, dtype=tensor.dtype).view(tensor.shape))


def compare_entries(pools: Pools, comparison: Comparison, dtype: torch.dtype) -> Differences:
    """Compare cached entries with computed ones; reads the result back from the device.

    Args:
        pools: Pools of the engine.
        comparison: Entries to compare.
        dtype: Type of the parameters, which decides the bound.
    """
    blocks = [_block_differences(pools.kv, pairs) for pairs in _groups(pools.kv, comparison.blocks)]
    states = None
    if comparison.states is not None:
        assert pools.live_states is not None, "only a model with states has snapshots"
        assert pools.snapshots is not None, "only a model with states has snapshots"
        running, slot = comparison.states
        live, kept = pools.live_states, pools.snapshots
        pairs = ((live.conv[:, running], kept.conv[:, slot]), (live.ssm[:, running], kept.ssm[:, slot]))
        states = max(float(_ratios(*pair).amax()) for pair in pairs)
    return Differences(
        comparison, tuple(ratio for group in blocks for ratio in group.tolist()), states, bound=BOUNDS[dtype]
    )


def _groups(kv: Tensor, pairs: Sequence[tuple[int, int]]) -> Iterator[Sequence[tuple[int, int]]]:
    """Split pairs of blocks so that no more than `_MAX_BYTES` are copied at once."""
    if not kv.shape[1]:  # no attention layers
        return
    size = max(1, _MAX_BYTES // (kv[:, :, 0].numel() * 4))
    for start in range(0, len(pairs), size):
        yield pairs[start : start + size]


def _block_differences(kv: Tensor, pairs: Sequence[tuple[int, int]]) -> Tensor:
    """Return the difference of each pair of blocks of `kv`, [2, L, blocks, B, heads, D]: [pairs]."""
    computed, cached = to_device(torch.tensor(pairs, dtype=torch.int64).T.contiguous(), kv.device)
    layers = kv.shape[:2]
    ratios = _ratios(kv.index_select(2, computed).flatten(0, 2), kv.index_select(2, cached).flatten(0, 2))
    return ratios.unflatten(0, (*layers, len(pairs))).amax((0, 1))


def _ratios(computed: Tensor, cached: Tensor) -> Tensor:
    """Return the largest difference over the largest computed value of each row; infinity where a value is NaN."""
    computed, cached = computed.flatten(1).float(), cached.flatten(1).float()
    if not computed.shape[1]:
        return computed.new_zeros(max(1, len(computed)))
    largest = computed.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny)
    return ((computed - cached).abs().amax(1) / largest).nan_to_num(torch.inf, torch.inf)
