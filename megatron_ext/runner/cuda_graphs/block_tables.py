"""Block tables of captured steps: kept on the device by running state slot; a step sends only the rows that changed."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megatron_ext.runner.cuda_graphs.input_buffers import HostBuffer
from megatron_ext.runner.input_writer import BlockRows


class BlockTables:
    """Block table of each running state slot, on the device.

    Rows are sent before a step's graph, which gathers its requests' rows: they may change places between two steps.
    Block ids are int32, two in a number of the buffer that is sent.

    Args:
        slots: Number of running state slots, the padding slot included.
        width: Blocks of the longest table.
        padding: Block id after a table's end.
        device: Device of the tables.
    """

    def __init__(self, slots: int, width: int, padding: int, device: torch.device) -> None:
        self.rows = BlockRows(padding)
        self._tables = torch.full((slots, width), padding, dtype=torch.int32, device=device)
        count = slots + -(-slots * width // 2)
        self._staged = torch.zeros(count, dtype=torch.int64, device=device)
        self._host = [HostBuffer(count, device) for _ in range(2)]

    def send(self) -> int:
        """Enqueue the copy of the rows that were written since the last call; return its bytes."""
        slots, rows = self.rows.changed(self._tables.shape[1])
        if not slots:
            return 0
        entries, buffer = rows.size, self._host[0]
        count = len(slots) + -(-entries // 2)
        buffer.wait()
        whole = buffer.whole[:count].numpy()
        whole[: len(slots)] = slots
        whole[len(slots) :].view(np.int32)[:entries] = rows.reshape(-1)
        self._staged[:count].copy_(buffer.whole[:count], non_blocking=True)
        buffer.mark()
        self._host.reverse()
        index, packed = self._staged[: len(slots)], self._staged[len(slots) : count]
        blocks = packed.view(torch.int32)[:entries].view(rows.shape)
        self._tables[:, : rows.shape[1]].index_copy_(0, index, blocks)
        return whole.nbytes

    def gather(self, slots: Tensor, width: int) -> Tensor:
        """Return the tables of slots [R] int64: [R, width] int32. Captured code."""
        return self._tables[:, :width].index_select(0, slots)
