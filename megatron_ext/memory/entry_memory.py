"""Cached blocks and snapshots as bytes on the host, in an order that does not depend on how the pools are laid out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron_ext.memory.arena_changes import make_changes
from megatron_ext.memory.pools import Pools
from megatron_ext.prefix_cache.block_pool import BlockId
from megatron_ext.prefix_cache.disk.data_file import Buffer
from megatron_ext.prefix_cache.hash_chain import BlockHash
from megatron_ext.prefix_cache.slabs import ArenaChanges
from megatron_ext.prefix_cache.state_index import SlotId


class PoolEntries:
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
