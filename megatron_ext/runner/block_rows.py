"""Block tables as rows of one array, which steps share: a table that is the one of the step before costs nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_ext.prefix_cache.block_pool import BlockId

Table = tuple[BlockId, ...]


class BlockRows:
    """A row for each running state slot, written when the table there is another one than before.

    A request's table is a tuple that is replaced when it changes (see `Sequence`), and what a row was written from is
    kept beside it; so the same tuple means the same row. There are as many rows as running state slots, as wide as the
    longest table so far: nothing else bounds or empties this, and nothing has to.
    """

    def __init__(self) -> None:
        self._written: list[Table] = []  # by running state slot
        self._rows = np.zeros((0, 0), dtype=np.int64)

    def of(self, slots: Sequence[int], tables: Sequence[Table]) -> np.ndarray:
        """The tables of requests with these running state slots, [R, W] int64, zero behind a table's end; a copy."""
        width = max(map(len, tables))
        self._ensure_capacity(max(slots) + 1, width)
        written = self._written
        for slot, table in zip(slots, tables, strict=True):
            if written[slot] is not table:
                self._write(slot, table)
        return self._rows[slots, :width]

    def _write(self, slot: int, table: Table) -> None:
        row = self._rows[slot]
        row[: len(table)] = table
        row[len(table) :] = 0
        self._written[slot] = table

    def _ensure_capacity(self, count: int, width: int) -> None:
        rows, columns = self._rows.shape
        if count <= rows and width <= columns:
            return
        room = np.zeros((max(count, rows), max(2 * width, columns)), dtype=np.int64)
        room[:rows, :columns] = self._rows
        self._rows = room
        self._written += [()] * (len(room) - rows)
