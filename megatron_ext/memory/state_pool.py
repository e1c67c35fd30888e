"""Pools of recurrent states on the device: running state slots, one per request, and snapshot slots."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ext.errors import RestoreError
from megatron_ext.memory.arena import aligned
from megatron_ext.ops import state_copy
from megatron_ext.ops.varlen import to_device
from megatron_ext.prefix_cache.slabs import StateCopy


@dataclass(frozen=True)
class StateShape:
    """Shapes of one sequence's states in the recurrent layers of this rank; all layers have the same shapes.

    The shapes come from a mixer's `mamba_state_shapes_per_request`: conv, (Cn, K-1), for the convolution, and ssm for
    the recurrence: (H, P, N) of Mamba-2, (D, N) of Mamba-1, (H, key channels, value channels) of a gated delta net;
    (0,) for a layer without recurrence.
    """

    layers: int
    conv: tuple[int, ...]
    ssm: tuple[int, ...]
    conv_dtype: torch.dtype
    ssm_dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Bytes of one sequence's states."""
        return self.layers * (self._conv_bytes + self._ssm_bytes)

    @property
    def record_bytes(self) -> int:
        """Bytes of one sequence's states as a record: conv of all layers, then ssm of all layers, each aligned."""
        return self.layers * (aligned(self._conv_bytes) + aligned(self._ssm_bytes))

    @property
    def _conv_bytes(self) -> int:
        return torch.Size(self.conv).numel() * self.conv_dtype.itemsize

    @property
    def _ssm_bytes(self) -> int:
        return torch.Size(self.ssm).numel() * self.ssm_dtype.itemsize

    def views(self, records: Tensor) -> tuple[Tensor, Tensor]:
        """Return views of records [rows, bytes], uint8 with adjacent rows: conv [L, rows, Cn, K-1], ssm [L, rows, ...].

        Rows may be longer than a record, by a multiple of the alignment.
        """
        conv, ssm = aligned(self._conv_bytes), aligned(self._ssm_bytes)
        return (
            self._view(records, self.conv, self.conv_dtype, 0, conv),
            self._view(records, self.ssm, self.ssm_dtype, self.layers * conv, ssm),
        )

    def _view(self, records: Tensor, shape: tuple[int, ...], dtype: torch.dtype, start: int, layer: int) -> Tensor:
        """Return a view [L, rows, *shape] of what begins `start` bytes after a record, with layers so far apart."""
        elements, size = records.flatten().view(dtype), dtype.itemsize
        strides = (layer // size, records.shape[1] // size, *torch.empty(shape, device="meta").stride())
        first = elements.storage_offset() + start // size
        return elements.as_strided((self.layers, len(records), *shape), strides, first)


class StatePool:
    """States of `rows` sequences: conv [L, rows, Cn, K-1], ssm [L, rows, ...].

    Rows are not cleared between requests: a step marks a new request as one without initial state.

    Args:
        shape: Shapes of one sequence's states.
        rows: Number of rows.
        device: Device of the states.
        records: Memory of the rows, [rows, bytes] uint8; see `StateShape.views`. None allocates dense tensors.
    """

    def __init__(self, shape: StateShape, rows: int, device: torch.device, records: Tensor | None = None) -> None:
        self.shape = shape
        if records is None:
            self.conv = torch.empty((shape.layers, rows, *shape.conv), dtype=shape.conv_dtype, device=device)
            self.ssm = torch.empty((shape.layers, rows, *shape.ssm), dtype=shape.ssm_dtype, device=device)
        else:
            assert len(records) == rows, "a record for each row"
            self.conv, self.ssm = shape.views(records)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Return views of one layer's states: conv [rows, Cn, K-1], ssm [rows, ...]."""
        return self.conv[index], self.ssm[index]


def copy_states(source: StatePool, rows: Sequence[int], target: StatePool, target_rows: Sequence[int]) -> None:
    """Copy the states of whole rows in all layers, on a device with one operation.

    Args:
        source: Pool to copy from.
        rows: Rows of the source, one for each target row.
        target: Pool to copy to, of the same shape as `source`.
        target_rows: Distinct rows of the target.
    """
    device = source.conv.device
    if device.type == "cpu":
        state_copy.copy_known_rows(((source.conv, target.conv), (source.ssm, target.ssm)), rows, target_rows)
        return
    index = to_device(torch.tensor([rows, target_rows], dtype=torch.int64), device)
    copy_rows(source, index[0], target, index[1])


def copy_rows(source: StatePool, rows: Tensor, target: StatePool, target_rows: Tensor) -> None:
    """Copy states between rows that are given as tensors on the device, [n] int64 each.

    A target row may occur twice only if it is never read; a pair that contains -1 is padding.
    """
    state_copy.copy_rows((source.conv, target.conv), (source.ssm, target.ssm), rows, target_rows)


class SnapshotPool(StatePool):
    """Snapshot slots, with a host-side record of each slot's block hash; None while its contents are undefined.

    Args:
        shape: See `StatePool`, also for the next three.
        slots: Number of slots.
        device: Device of the states.
        records: Memory of the slots.
    """

    def __init__(self, shape: StateShape, slots: int, device: torch.device, records: Tensor | None = None) -> None:
        super().__init__(shape, slots, device, records)
        self._contents: list[bytes | None] = [None] * slots

    def open(self, slots: Sequence[int]) -> None:
        """Mark slots as undefined, since they are about to be written."""
        for slot in slots:
            self._contents[slot] = None

    def forget_slabs(self, slabs: Sequence[int], kept: Collection[int]) -> None:
        """Mark slots that are slabs of another type from now on as undefined: blocks overwrite them, or did.

        Args:
            slabs: Slabs of an arena.
            kept: Slots that have been written meanwhile.
        """
        self.open([slab for slab in slabs if slab not in kept])

    def copy_within(self, copies: Sequence[StateCopy]) -> None:
        """Copy complete states from slots apart from the arena to their snapshots' slots.

        Raises:
            RestoreError: A source is not complete. Nothing is copied.
        """
        for copy in copies:
            if self._contents[copy.source] is None:
                raise RestoreError(
                    f"snapshot slot {copy.source} should hold states, and is unfinished", copy.block_hash
                )
        copy_states(self, [one.source for one in copies], self, [one.slot for one in copies])
        self.close([one.slot for one in copies], [one.block_hash for one in copies])

    def close(self, slots: Sequence[int], block_hashes: Sequence[bytes]) -> None:
        """Record that slots are complete in all layers, each with the states at the end of the block of its hash."""
        for slot, block_hash in zip(slots, block_hashes, strict=True):
            self._contents[slot] = block_hash

    def restore(
        self, slots: Sequence[int], block_hashes: Sequence[bytes], live: StatePool, rows: Sequence[int]
    ) -> None:
        """Copy snapshots into running state slots.

        Raises:
            RestoreError: A slot does not hold the states of its block hash. No row is written.
        """
        self.check(slots, block_hashes)
        copy_states(self, slots, live, rows)

    def check(self, slots: Sequence[int], block_hashes: Sequence[bytes]) -> None:
        """Check that slots hold the states of the given block hashes.

        Raises:
            RestoreError: A slot does not hold the states of its block hash.
        """
        for slot, block_hash in zip(slots, block_hashes, strict=True):
            if self._contents[slot] != block_hash:
                found = "unfinished states" if self._contents[slot] is None else "the states of another one"
                raise RestoreError(  # no block hashes in the text: they would confirm a guessed prompt
                    f"snapshot slot {slot} should hold the states of one prefix, and holds {found}", block_hash
                )
