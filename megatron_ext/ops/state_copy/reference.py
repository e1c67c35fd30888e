"""Copies of states in plain torch, on any device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_ext.ops.backends import FunctionBackend, anything

PoolPair = tuple[Tensor, Tensor]
"""Source and target pool of a copy."""


def copy_known_rows(pools: Sequence[PoolPair], rows: Sequence[int], target_rows: Sequence[int]) -> None:
    """Copy rows whose numbers are known on the host, on a CPU: one by one, without temporaries."""
    for row, target_row in zip(rows, target_rows, strict=True):
        for source, target in pools:
            target[:, target_row] = source[:, row]


def copy_rows(convolutions: PoolPair, recurrences: PoolPair, rows: Tensor, target_rows: Tensor) -> None:
    """Copy rows; padding repeats the first real pair, or rewrites row 0 with its own content if there is no pair."""
    is_pair = (rows >= 0) & (target_rows >= 0)
    chosen = torch.arange(len(rows), device=rows.device).where(is_pair, is_pair.int().argmax())
    rows, target_rows = (index.index_select(0, chosen).clamp(min=0) for index in (rows, target_rows))
    is_any = is_pair.any()
    for source, target in (convolutions, recurrences):
        kept = target[:, target_rows]  # `index_select` would copy a whole pool that is not contiguous
        target.index_copy_(1, target_rows, source[:, rows].where(is_any, kept))


BACKEND = FunctionBackend("reference", anything, copy_rows)
