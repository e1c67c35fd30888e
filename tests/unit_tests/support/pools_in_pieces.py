"""Pools whose blocks and snapshots lie as in an arena, with gaps between them, each kind in memory of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

from megatron_ext.mcore import context
from megatron_ext.memory.pools import Pools
from megatron_ext.memory.state_pool import SnapshotPool

GAP = 192  # bytes


@contextmanager
def pools_in_pieces() -> Iterator[None]:
    """Within it engines allocate blocks page first, and snapshots as records of all layers."""
    allocate = context.allocate_pools

    def allocate_in_pieces(*arguments: object) -> Pools:
        pools = allocate(*arguments)
        snapshots = pools.snapshots
        if snapshots is not None:
            slots, device = snapshots.conv.shape[1], snapshots.conv.device
            records = torch.empty(slots, snapshots.shape.record_bytes + GAP, dtype=torch.uint8, device=device)
            snapshots = SnapshotPool(snapshots.shape, slots, device, records)
        return dataclasses.replace(pools, kv=_page_first(pools.kv), snapshots=snapshots)

    with mock.patch.object(context, "allocate_pools", allocate_in_pieces):
        yield


def _page_first(kv: Tensor) -> Tensor:
    """Return an uninitialised tensor of the same shape [2, layers, blocks, B, heads, D], a gap after each block."""
    layers, blocks, *inner = kv.shape[1:]
    size = 2 * layers * torch.Size(inner).numel()
    memory = torch.empty(blocks, size + GAP // kv.element_size(), dtype=kv.dtype, device=kv.device)
    return memory[:, :size].unflatten(1, (layers, 2, *inner)).permute(2, 1, 0, 3, 4, 5)
