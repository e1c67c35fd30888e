"""How rank 0's batches reach the others: one small message a step, over gloo, beside whatever the model uses."""

from __future__ import annotations

import pickle

import torch
from torch.distributed import ProcessGroup, broadcast

from megatron_ext.ranks.commands import Action, Batch

_LENGTH_BITS = 56  # of the header, for the bytes that follow it; the others say the action


class Link:
    """From rank 0 to all ranks, in order.

    A batch is a header of 8 bytes and, if there are commands, their pickle. Ranks trust each other: they run the same
    program for the same user, and whoever can write into their connections is one of them.

    Args:
        group: Of all ranks.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def send(self, batch: Batch) -> None:
        """For rank 0: all others get this next."""
        body = pickle.dumps(batch.commands, pickle.HIGHEST_PROTOCOL) if batch.commands else b""
        broadcast(torch.tensor([batch.action << _LENGTH_BITS | len(body)]), 0, group=self._group)
        if body:
            broadcast(torch.frombuffer(bytearray(body), dtype=torch.uint8), 0, group=self._group)

    def receive(self) -> Batch:
        """For the others: wait for the next one."""
        header = torch.empty(1, dtype=torch.int64)
        broadcast(header, 0, group=self._group)
        action, length = divmod(int(header), 1 << _LENGTH_BITS)
        if not length:
            return Batch(Action(action))
        body = torch.empty(length, dtype=torch.uint8)
        broadcast(body, 0, group=self._group)
        return Batch(Action(action), pickle.loads(body.numpy().tobytes()))
