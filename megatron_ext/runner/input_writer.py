"""Writer of the input arrays of a step's forward, for eager and captured steps alike.

It writes the chunks that it is given. An eager step has its own chunks, in arrays of exact sizes; a captured one has
dummy requests beside them, and pads the arrays to its bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Final

import numpy as np
import torch

from megatron_ext.mixers.recurrent import cut_between
from megatron_ext.ops.varlen import chunk_arrays, starts
from megatron_ext.prefix_cache.block_pool import BlockId
from megatron_ext.scheduling.step import ScheduledChunk

Table = tuple[BlockId, ...]
KEPT: Final = ("kept_slots", "kept_offsets", "kept_chunks", "kept_tokens")
"""Arrays of the states that are kept inside prefills; see `ops.state_slots.SnapshotPlaces`."""
Cuts = Sequence[Sequence[int]]


class BlockRows:
    """Block table rows by running state slot; a row is written only when its table has changed.

    A request's table is a tuple that is replaced when it changes (see `Request`). The tuple that a row was written
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


@dataclass(frozen=True)
class StagingRules:
    """Constants of pools and model that staging needs.

    Attributes:
        block_size: Tokens of a block.
        dummy_block: Block for K/V that must not be written to the cache.
        kernel_chunk: Maximum number of tokens of a kernel chunk.
        has_states: True if this rank has recurrent layers.
        snapshots_in_prefill: True if mixers keep states inside a prefill; otherwise the caller copies running states.
        device: Device of the tensors.
    """

    block_size: int
    dummy_block: int
    kernel_chunk: int
    has_states: bool
    snapshots_in_prefill: bool
    device: torch.device


def input_arrays(
    chunks: Sequence[ScheduledChunk], num_decode: int, cuts: Cuts, rules: StagingRules, block_rows: BlockRows
) -> dict[str, np.ndarray]:
    """Return the arrays of a step's chunks, integers, in one pass over them.

    Args:
        chunks: Chunks in the order of the token axis: R of N tokens, the decodes first.
        num_decode: Number of decodes.
        cuts: Tokens of each kernel chunk of each prefill, see `cut_chunk`; zeros for chunks without tokens.
        rules: Constants of pools and model.
        block_rows: Block table rows of this step and of previous ones.

    Returns:
        Token ids, positions and slot mapping [N]; block table [R, W]; `cu_seqlens_q` [R + 1], `seqlens_k` and `slots`
        [R]; and arrays of the prefills, if there are any and this rank has recurrent layers.
    """
    begins, ends = [chunk.start for chunk in chunks], [chunk.end for chunk in chunks]
    slots, tables = [chunk.running_slot for chunk in chunks], [chunk.block_ids for chunk in chunks]
    table = block_rows.of(slots, tables)
    assert (np.asarray([len(one) for one in tables]) * rules.block_size >= ends).all(), "keys nowhere"
    firsts = starts([end - begin for begin, end in zip(begins, ends, strict=True)])
    arrays = _token_arrays(chunks, table, np.asarray(begins), firsts, rules) | {
        "block_table": table,
        "cu_seqlens_q": firsts,
        "seqlens_k": np.asarray(ends),
        "slots": np.asarray(slots),
    }
    if rules.has_states and num_decode < len(chunks):
        arrays |= _prefill_arrays(chunks[num_decode:], cuts, rules)
    return arrays


def _token_arrays(
    chunks: Sequence[ScheduledChunk], table: np.ndarray, begins: np.ndarray, firsts: np.ndarray, rules: StagingRules
) -> dict[str, np.ndarray]:
    """Return the arrays with an entry per packed token.

    KV goes to the token's place in its block; KV that shared blocks already hold goes to the dummy block (KV-3).
    """
    total, lengths = int(firsts[-1]), np.diff(firsts)
    token_ids = np.fromiter(chain.from_iterable([chunk.token_ids for chunk in chunks]), np.int64, total)
    positions = np.arange(total) + np.repeat(begins - firsts[:-1], lengths)
    owners = np.repeat(np.arange(len(chunks)), lengths)
    shared_ends = np.asarray([chunk.shared_end for chunk in chunks])
    blocks, places = np.divmod(positions, rules.block_size)
    blocks = np.where(positions < shared_ends[owners], rules.dummy_block, table[owners, blocks]).astype(np.int64)
    return {"input_ids": token_ids, "position_ids": positions, "slot_mapping": blocks * rules.block_size + places}


def _prefill_arrays(prefill: Sequence[ScheduledChunk], cuts: Cuts, rules: StagingRules) -> dict[str, np.ndarray]:
    """Return the arrays of the sequences and their kernel chunks, and of the k states kept inside them."""
    arrays = chunk_arrays(cuts) | {"has_state": np.asarray([chunk.start > 0 for chunk in prefill])}
    return arrays | dict(zip(KEPT, _kept_states(prefill, arrays["cu_chunk_seqlens"], rules), strict=True))


def _kept_states(
    prefill: Sequence[ScheduledChunk], chunk_ends: np.ndarray, rules: StagingRules
) -> tuple[np.ndarray, ...]:
    """Return the arrays of `KEPT` of the states kept inside prefills, ordered by sequences and tokens.

    Each is the end of a kernel chunk (HY-9). States of prefills that keep none inside are copied after the forward.
    """
    kept = []
    first_token = 0
    for i, chunk in enumerate(prefill):
        inside = chunk.snapshots if _keeps_inside(chunk, rules.snapshots_in_prefill) else ()
        for snapshot in sorted(inside, key=attrgetter("position")):
            kept.append((snapshot.slot, i, first_token + snapshot.position - chunk.start))
        first_token += chunk.length
    slots, sequences, tokens = np.asarray(kept, dtype=np.int64).reshape(-1, 3).T
    offsets = np.searchsorted(sequences, np.arange(len(prefill) + 1))
    return slots, offsets, np.searchsorted(chunk_ends[1:], tokens), tokens


def cut_chunk(chunk: ScheduledChunk, kernel_chunk: int, *, snapshots_in_prefill: bool) -> list[int]:
    """Return the tokens of each kernel chunk of a prefill; one ends wherever a state is kept inside."""
    inside = chunk.snapshots if _keeps_inside(chunk, snapshots_in_prefill) else ()
    return cut_between(chunk.start, chunk.length, kernel_chunk, sorted({one.position for one in inside}))


def _keeps_inside(chunk: ScheduledChunk, snapshots_in_prefill: bool) -> bool:
    return snapshots_in_prefill or bool(chunk.target_sampling)
