"""Pools whose contents wait in host memory while the device's memory is free for other programs."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ext.memory.pools import Pools


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
