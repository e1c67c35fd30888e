"""Copies of states from rows of some pools to rows of others, all layers at once: restores and snapshots."""

from __future__ import annotations

from torch import Tensor

from megatron_ext.ops.backends import Backends
from megatron_ext.ops.state_copy import reference, triton
from megatron_ext.ops.state_copy.reference import PoolPair

STATE_COPY = Backends("state_copy", triton.BACKEND, reference.BACKEND)


def copy_rows(convolutions: PoolPair, recurrences: PoolPair, rows: Tensor, target_rows: Tensor) -> None:
    """Copy whole rows of two kinds of states.

    Shapes decide what runs and no row does, so a CUDA graph of a copy is right for other rows.

    Args:
        convolutions: Source and target, [L, rows, ...] each, of the same layers, states and type; written in place.
        recurrences: The same of the other kind, whose states and type are its own.
        rows: [n] int64, of the sources, one for each of
        target_rows: [n] int64; one may come twice if nobody reads it. A pair with -1 in it is padding: nothing is
            read or written.
    """
    if rows.numel():
        STATE_COPY.choose(convolutions[0]).copy(convolutions, recurrences, rows, target_rows)


__all__ = ["STATE_COPY", "PoolPair", "copy_rows"]
