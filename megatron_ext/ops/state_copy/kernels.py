"""Copies of states on a CUDA device: both kinds, all layers and rows in one launch, as untyped words."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_ext.ops.backends import NoKernelError
from megatron_ext.ops.state_copy import PoolPair
from megatron_ext.ops.triton.kernel_registry import config, kernel
from megatron_ext.ops.triton.launching import own_rows

WORDS = ("i16", "i32")


@triton.jit
def copy_block(source, target, size, block, BLOCK: tl.constexpr):
    """Copy BLOCK of the `size` words at `source` to `target`."""
    at = block * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(source + at, mask=at < size)
    tl.store(target + at, words, mask=at < size)


@kernel(
    pointers={"C": "conv_from conv_to", "R": "state_from state_to", "i64": "rows target_rows"},
    counts="pairs layers",
    types=[{"C": conv, "R": state} for conv in WORDS for state in WORDS],
    configs=[config(BLOCK=2048, PAIRS=pairs) for pairs in (16, 256, 4096)],
)
def copy_states(
    conv_from, conv_to, state_from, state_to, rows, target_rows, conv_from_layer, conv_from_row, conv_to_layer,
    conv_to_row, state_from_layer, state_from_row, state_to_layer, state_to_row, conv_size, state_size, pairs, layers,
    BLOCK: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Copy blocks of rows of layers, of both kinds; programs take turns over the blocks, and skip padding pairs.

    The grid is any number of programs: in most steps there are few pairs, or none, among many that are padding.
    """
    place = tl.arange(0, PAIRS)
    sources = tl.load(rows + place, mask=place < pairs, other=-1)
    targets = tl.load(target_rows + place, mask=place < pairs, other=-1)
    is_pair = (sources >= 0) & (targets >= 0)
    number = tl.cumsum(is_pair.to(tl.int32), 0)
    conv_blocks = tl.cdiv(conv_size, BLOCK).to(tl.int32)
    blocks = conv_blocks + tl.cdiv(state_size, BLOCK).to(tl.int32)
    for item in range(tl.program_id(0), tl.sum(is_pair.to(tl.int32), 0) * layers * blocks, tl.num_programs(0)):
        is_own = is_pair & (number == item // (layers * blocks) + 1)
        row, target_row = tl.sum(tl.where(is_own, sources, 0), 0), tl.sum(tl.where(is_own, targets, 0), 0)
        layer, block = (item // blocks % layers).to(tl.int64), item % blocks
        if block < conv_blocks:
            source = conv_from + layer * conv_from_layer + row * conv_from_row
            copy_block(source, conv_to + layer * conv_to_layer + target_row * conv_to_row, conv_size, block, BLOCK)
        else:
            state = state_from + layer * state_from_layer + row * state_from_row
            target = state_to + layer * state_to_layer + target_row * state_to_row
            copy_block(state, target, state_size, block - conv_blocks, BLOCK)


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
        if not all(map(own_rows, pool[:1])):  # all layers have the same strides
            raise NoKernelError("copies of states have no kernel for states that are not contiguous")


def pair_counts(most: int) -> list[int]:
    """Return numbers of pairs that take every configuration which copies of 1 to `most` pairs take."""
    limits = [0, *(one["PAIRS"] for one in copy_states.configs)]
    return [limit + 1 for limit in limits[:-1] if limit < most]


def launch_copy_rows(convolutions: PoolPair, recurrences: PoolPair, rows: Tensor, target_rows: Tensor) -> None:
    _require((*convolutions, *recurrences))
    most = copy_states.configs[-1]["PAIRS"]
    if len(rows) > most:
        for some, targets in zip(rows.split(most), target_rows.split(most), strict=True):
            launch_copy_rows(convolutions, recurrences, some, targets)
        return
    words = [_words(pool) for pool in (*convolutions, *recurrences)]
    pools = dict(zip(("conv_from", "conv_to", "state_from", "state_to"), words, strict=True))
    strides = {f"{name}_{axis}": t.stride(i) for name, t in pools.items() for i, axis in enumerate(("layer", "row"))}
    config = next(one for one in copy_states.configs if one["PAIRS"] >= len(rows))
    (layers, _, conv_size), state_size = words[0].shape, words[2].shape[2]
    blocks = sum(-(-size // config["BLOCK"]) for size in (conv_size, state_size))
    copy_states.launch(
        (min(PROGRAMS, len(rows) * layers * blocks),),
        config,
        rows=rows.contiguous(),
        target_rows=target_rows.contiguous(),
        pairs=len(rows),
        layers=layers,
        conv_size=conv_size,
        state_size=state_size,
        **pools,
        **strides,
    )
