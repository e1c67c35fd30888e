"""Link from rank 0 to the others: one small message per step over gloo, separate from the model's communication."""

from __future__ import annotations

import pickle
import struct

import torch
from torch.distributed import ProcessGroup, all_reduce, broadcast

from megatron_ext.parallel.commands import Action, Batch

HEAD = struct.Struct("<BxxxI")  # action, bytes of the commands
"""Head of a batch: a broadcast has a size that all ranks know beforehand, so the first message has a constant one."""


class Link:
    """Ordered channel from rank 0 to all ranks.

    A batch is one message of 8 bytes; its commands, if there are any, are a second one, whose length is in the first.
    Ranks trust each other: they run the same program for the same user, and any process that can write to their
    connections is trusted.

    Args:
        group: Group of all ranks.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def send(self, batch: Batch) -> None:
        """Send a batch to all other ranks, on rank 0."""
        body = pickle.dumps(batch.commands, pickle.HIGHEST_PROTOCOL) if batch.commands else b""
        for part in (HEAD.pack(batch.action, len(body)), body):
            if part:
                broadcast(torch.frombuffer(bytearray(part), dtype=torch.uint8), 0, group=self._group)

    def receive(self) -> Batch:
        """Wait for the next batch, on the other ranks."""
        action, length = HEAD.unpack(self._receive(HEAD.size))
        return Batch(Action(action), pickle.loads(self._receive(length)) if length else ())

    def meet(self) -> None:
        """Return when all ranks have called this."""
        all_reduce(torch.zeros(1), group=self._group)

    def _receive(self, length: int) -> bytes:
        part = torch.empty(length, dtype=torch.uint8)
        broadcast(part, 0, group=self._group)
        return part.numpy().tobytes()
