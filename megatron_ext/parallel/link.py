"""How rank 0's batches reach the others: one small message a step, over gloo, beside whatever the model uses."""

from __future__ import annotations

import torch
from torch.distributed import ProcessGroup, broadcast

from megatron_ext.parallel.batch_encoding import HEAD_BYTES, body_length, pack, unpack
from megatron_ext.parallel.commands import Batch


class Link:
    """From rank 0 to all ranks, in order.

    A batch is one message of 16 bytes; what does not fit there (new requests with their prompts) is a second one. Ranks
    trust each other: they run the same program for the same user, and whoever can write into their connections is one
    of them.

    Args:
        group: Of all ranks.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def send(self, batch: Batch) -> None:
        """For rank 0: all others get this next."""
        head, body = pack(batch)
        for part in (head, body) if body else (head,):
            broadcast(torch.frombuffer(bytearray(part), dtype=torch.uint8), 0, group=self._group)

    def receive(self) -> Batch:
        """For the others: wait for the next one."""
        head = self._receive(HEAD_BYTES)
        length = body_length(head)
        return unpack(head, self._receive(length) if length else b"")

    def _receive(self, length: int) -> bytes:
        part = torch.empty(length, dtype=torch.uint8)
        broadcast(part, 0, group=self._group)
        return part.numpy().tobytes()
