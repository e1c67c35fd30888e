"""Copies of states from rows of some pools to rows of others, all layers at once: restores and snapshots."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_ext.ops import triton
from megatron_ext.ops.backends import Operator

STATE_COPY = Operator("state_copy", triton.backend(__name__))
PoolPair = tuple[Tensor, Tensor]
"""Source and target pool of a copy."""


def copy_known_rows(pools: Sequence[PoolPair], rows: Sequence[int], target_rows: Sequence[int]) -> None:
    """Copy rows whose numbers are known on the host, on a CPU: one by one, without temporaries."""
    for row, target_row in zip(rows, target_rows, strict=True):
        for source, target in pools:
            target[:, target_row] = source[:, row]


@STATE_COPY
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
    if not rows.numel():
        return
    # Padding repeats the first real pair, or rewrites row 0 with its own content if there is no pair.
    is_pair = (rows >= 0) & (target_rows >= 0)
    chosen = torch.arange(len(rows), device=rows.device).where(is_pair, is_pair.int().argmax())
    rows, target_rows = (index.index_select(0, chosen).clamp(min=0) for index in (rows, target_rows))
    is_any = is_pair.any()
    for source, target in (convolutions, recurrences):
        kept = target[:, target_rows]  # `index_select` would copy a whole pool that is not contiguous
        target.index_copy_(1, target_rows, source[:, rows].where(is_any, kept))
