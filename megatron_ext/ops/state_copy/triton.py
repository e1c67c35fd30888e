"""Copies of states in Triton, for CUDA devices: one launch without temporaries, with the kernel in `kernels.py`."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from megatron_ext.ops import triton
from megatron_ext.ops.backends import FunctionBackend, NoKernelError
from megatron_ext.ops.state_copy.reference import PoolPair
from megatron_ext.ops.triton.kernel_registry import Config
from megatron_ext.ops.triton.launching import require_own_rows

PROGRAMS = 1024
"""Maximum number of programs of a launch: some for each multiprocessor."""


def _words(pool: Tensor) -> Tensor:
    """View the pool as [L, rows, words] with words of 16 or 32 bits."""
    return pool.flatten(2).view(torch.int16 if pool.element_size() == 2 else torch.int32)


def _require(pools: Iterable[Tensor]) -> None:
    """Raise `NoKernelError` unless a kernel supports these pools."""
    for pool in pools:
        if pool.element_size() not in (2, 4, 8):
            raise NoKernelError(f"copies of states have no kernel for {pool.dtype}")
        for layer in pool[:1]:  # all layers have the same strides
            require_own_rows(layer, "copying")


def _config(pairs: int) -> Config:
    """Return the smallest configuration that holds `pairs` pairs of rows; one must."""
    from megatron_ext.ops.state_copy import kernels

    return next(one for one in kernels.copy_states.configs if one["PAIRS"] >= pairs)


def pair_counts(most: int) -> list[int]:
    """Return numbers of pairs that take every configuration which copies of 1 to `most` pairs take."""
    from megatron_ext.ops.state_copy import kernels

    limits = [0, *(one["PAIRS"] for one in kernels.copy_states.configs)]
    return [limit + 1 for limit in limits[:-1] if limit < most]


def copy_rows(convolutions: PoolPair, recurrences: PoolPair, rows: Tensor, target_rows: Tensor) -> None:
    _require((*convolutions, *recurrences))
    from megatron_ext.ops.state_copy import kernels

    conv_from, conv_to, state_from, state_to = (_words(pool) for pool in (*convolutions, *recurrences))
    most = kernels.copy_states.configs[-1]["PAIRS"]
    if len(rows) > most:
        for some, targets in zip(rows.split(most), target_rows.split(most), strict=True):
            copy_rows(convolutions, recurrences, some, targets)
        return None
    config = _config(len(rows))
    blocks = sum(-(-words.shape[2] // config["BLOCK"]) for words in (conv_from, state_from))
    return kernels.copy_states.launch(
        (min(PROGRAMS, len(rows) * len(conv_from) * blocks),),
        config,
        pairs=len(rows),
        layers=len(conv_from),
        conv_from=conv_from,
        conv_to=conv_to,
        state_from=state_from,
        state_to=state_to,
        rows=rows.contiguous(),
        target_rows=target_rows.contiguous(),
        conv_from_layer=conv_from.stride(0),
        conv_from_row=conv_from.stride(1),
        conv_to_layer=conv_to.stride(0),
        conv_to_row=conv_to.stride(1),
        state_from_layer=state_from.stride(0),
        state_from_row=state_from.stride(1),
        state_to_layer=state_to.stride(0),
        state_to_row=state_to.stride(1),
        conv_size=conv_from.shape[2],
        state_size=state_from.shape[2],
    )


BACKEND = FunctionBackend(triton.NAME, triton.takes, copy_rows)
