"""Copies of states from rows of some pools to rows of others, all layers at once: restores and snapshots."""

from __future__ import annotations

from torch import Tensor

from megatron_ext.ops.backends import Backends
from megatron_ext.ops.state_copy import reference, triton
from megatron_ext.ops.state_copy.reference import PoolPair, copy_known_rows

STATE_COPY = Backends("state_copy", triton.BACKEND, reference.BACKEND)


def copy_rows(convolutions: PoolPair, recurrences: PoolPair, rows: Tensor, target_rows: Tensor) -> None:
    """Copy whole rows of two kinds of states.

    Only shapes, not row numbers, determine the launches, so a CUDA graph of a copy is right for other rows.

    Args:
        convolutions: Source and target, [L, rows, ...] each, of the same layers, states and type; written in place.
        recurrences: Source and target of the recurrent states, whose shape and type may differ.
        rows: [n] int64, source rows, one for each of
        target_rows: [n] int64, target rows; a row may occur twice if its content is not read. A pair that contains -1
            is padding: nothing is read or written.
    """
    if rows.numel():
        STATE_COPY.compute(
            convolutions[0], lambda backend: backend.function(convolutions, recurrences, rows, target_rows)
        )


__all__ = ["STATE_COPY", "PoolPair", "copy_known_rows", "copy_rows"]
