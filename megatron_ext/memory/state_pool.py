"""States of recurrent layers on the device: live ones, a row per running request, and snapshots, a slot each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ext.errors import RestoreError
from megatron_ext.ops import state_copy
from megatron_ext.ops.transfer import to_device


@dataclass(frozen=True)
class StateShape:
    """One sequence's states in all recurrent layers of this rank, which all have the same shapes.

    What a mixer's `mamba_state_shapes_per_request` says: conv, (Cn, K-1), is the convolution's, ssm the recurrence's of
    any shape: (H, P, N) of Mamba-2, (D, N) of Mamba-1, (H, key channels, value channels) of a gated delta net; (0,)
    if there is none.
    """

    layers: int
    conv: tuple[int, ...]
    ssm: tuple[int, ...]
    conv_dtype: torch.dtype
    ssm_dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Bytes of one sequence's states."""
        conv = torch.Size(self.conv).numel() * self.conv_dtype.itemsize
        return self.layers * (conv + torch.Size(self.ssm).numel() * self.ssm_dtype.itemsize)


class StatePool:
    """States of `rows` sequences; conv [L, rows, Cn, K-1], ssm [L, rows, ...].

    Rows are not cleared between owners: a new owner says that it has no initial state.
    """

    def __init__(self, shape: StateShape, rows: int, device: torch.device) -> None:
        self.shape = shape
        self.conv = torch.empty((shape.layers, rows, *shape.conv), dtype=shape.conv_dtype, device=device)
        self.ssm = torch.empty((shape.layers, rows, *shape.ssm), dtype=shape.ssm_dtype, device=device)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """One layer's states, as views: conv [rows, Cn, K-1], ssm [rows, ...]."""
        return self.conv[index], self.ssm[index]


def copy_states(source: StatePool, rows: Sequence[int], target: StatePool, target_rows: Sequence[int]) -> None:
    """Copy the states of whole rows, all layers, in one go.

    Args:
        source: Pool of the same shape as `target`.
        rows: Of the source, one for each of
        target_rows: distinct ones.
    """
    device = source.conv.device
    index = to_device(torch.tensor([rows, target_rows], dtype=torch.int64), device)
    copy_rows(source, index[0], target, index[1])


def copy_rows(source: StatePool, rows: Tensor, target: StatePool, target_rows: Tensor) -> None:
    """The same where the device has the rows, [n] int64 each.

    A target row may come twice if nobody reads it; a pair with -1 in it is padding.
    """
    state_copy.copy_rows((source.conv, target.conv), (source.ssm, target.ssm), rows, target_rows)


class SnapshotPool(StatePool):
    """Snapshots, and on the host a note of what each slot holds: a block hash, or None while anything may be in it."""

    def __init__(self, shape: StateShape, slots: int, device: torch.device) -> None:
        super().__init__(shape, slots, device)
        self._contents: list[bytes | None] = [None] * slots

    def open(self, slots: Sequence[int]) -> None:
        """These are about to be written."""
        for slot in slots:
            self._contents[slot] = None

    def close(self, slots: Sequence[int], block_hashes: Sequence[bytes]) -> None:
        """They have been written, all layers: each holds the states at the end of the block of its block hash."""
        for slot, block_hash in zip(slots, block_hashes, strict=True):
            self._contents[slot] = block_hash

    def restore(
        self, slots: Sequence[int], block_hashes: Sequence[bytes], live: StatePool, rows: Sequence[int]
    ) -> None:
        """Copy snapshots into running state slots.

        Raises:
            RestoreError: A slot holds something else than the states of its block hash. No row is written.
        """
        self.check(slots, block_hashes)
        copy_states(self, slots, live, rows)

    def check(self, slots: Sequence[int], block_hashes: Sequence[bytes]) -> None:
        """See that slots hold what somebody is to resume from.

        Raises:
            RestoreError: One holds something else than the states of its block hash.
        """
        for slot, block_hash in zip(slots, block_hashes, strict=True):
            if self._contents[slot] != block_hash:
                found = "unfinished ones" if self._contents[slot] is None else "those of another one"
                raise RestoreError(  # without the block hashes, which say what a prompt was to who can guess it
                    f"snapshot slot {slot} was to hold the states of one prefix, and holds {found}", block_hash
                )
