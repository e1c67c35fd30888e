"""Block tables of running requests as rows of one array that steps share; an unchanged table is not written again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_ext.prefix_cache.block_pool import BlockId

Table = tuple[BlockId, ...]


class BlockRows:
    """Block table rows by running state slot; a row is written only when its table has changed.

    A request's table is a tuple that is replaced when it changes (see `Sequence`). The tuple that a row was written
    from is kept, so an identical tuple means that the row is up to date. The array has as many rows as running state
    slots and the width of the longest table so far; nothing else bounds or empties it, which is not needed.

    Args:
        padding: Block id after a table's end.
    """

    def __init__(self, padding: int = 0) -> None:
        self._padding = padding
        self._written: list[Table] = []  # by running state slot
        self._rows = np.zeros((0, 0), dtype=np.int32)
        self._changed: set[int] = set()

    def of(self, slots: Sequence[int], tables: Sequence[Table]) -> np.ndarray:
        """Return a copy of the tables in these running state slots, [R, W] int32, padded after a table's end."""
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
        row[len(table) :] = self._padding
        self._written[slot] = table
        self._changed.add(slot)

    def changed(self, width: int) -> tuple[list[int], np.ndarray]:
        """Return the running state slots written since the last call, and their rows, cut to `width`: [n, W] int32."""
        slots = sorted(self._changed)
        self._changed.clear()
        return slots, self._rows[slots, :width]

    def _ensure_capacity(self, count: int, width: int) -> None:
        rows, columns = self._rows.shape
        if count <= rows and width <= columns:
            return
        room = np.full((max(count, rows), max(2 * width, columns)), self._padding, dtype=np.int32)
        room[:rows, :columns] = self._rows
        self._rows = room
        self._written += [()] * (len(room) - rows)
