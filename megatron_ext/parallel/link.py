"""Link from rank 0 to the others: one small message per step over gloo, separate from the model's communication."""

from __future__ import annotations

import torch
from torch.distributed import ProcessGroup, all_reduce, broadcast

from megatron_ext.parallel.batch_encoding import HEAD_BYTES, body_length, pack, unpack
from megatron_ext.parallel.commands import Batch


class Link:
    """Ordered channel from rank 0 to all ranks.

    A batch is one message of 16 bytes; commands that do not fit (new requests with their prompts) are a second one.
    Ranks trust each other: they run the same program for the same user, and any process that can write to their
    connections is trusted.

    Args:
        group: Group of all ranks.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def send(self, batch: Batch) -> None:
        """Send a batch to all other ranks, on rank 0."""
        head, body = pack(batch)
        for part in (head, body) if body else (head,):
            broadcast(torch.frombuffer(bytearray(part), dtype=torch.uint8), 0, group=self._group)

    def receive(self) -> Batch:
        """Wait for the next batch, on the other ranks."""
        head = self._receive(HEAD_BYTES)
        length = body_length(head)
        return unpack(head, self._receive(length) if length else b"")

    def meet(self) -> None:
        """Return when all ranks have called this."""
        all_reduce(torch.zeros(1), group=self._group)

    def _receive(self, length: int) -> bytes:
        part = torch.empty(length, dtype=torch.uint8)
        broadcast(part, 0, group=self._group)
        return part.numpy().tobytes()
