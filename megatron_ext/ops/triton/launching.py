"""Shared parts of kernel launches: state slots, contiguous rows, and messages for missing kernels."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_ext.ops.cpp import say
from megatron_ext.ops.state_slots import StateSlots
from megatron_ext.ops.triton.kernel_registry import Argument, Config, Kernel
from megatron_ext.ops.varlen import PackedChunks


def tile_count(tokens: int, pieces: int, rows: int, size: int, least: int = 1) -> int:
    """Return the number of programs for `pieces` pieces of at most `tokens` tokens in total, `rows` rows a token.

    Tiles have `size` rows. Piece p has the tiles from floor(tokens before it * rows / size) + least * p on: as many as
    it needs or one more, and each at least `least`: 1, or 2 if its first tile may have fewer rows. `device.find_piece`
    finds them on the device; programs without rows return at once.
    """
    return tokens * rows // size + least * pieces


def rows_of(t: Tensor) -> Tensor:
    """Return `t` [T, ...] with all but the first dimension contiguous; `t` itself if it is, as most views are."""
    expected = 1
    for size, stride in zip(reversed(t.shape[1:]), reversed(t.stride()[1:]), strict=True):
        if size != 1 and stride != expected:
            return t.contiguous()
        expected *= size
    return t


def own_rows(pool: Tensor) -> bool:
    """Return whether each slot of a pool [slots, ...] is contiguous, as kernels require."""
    return rows_of(pool) is pool


def is_aligned(*inputs: Tensor) -> bool:
    """Return whether inputs [T, heads, channels] begin at multiples of 16 bytes, rows and heads at 16 elements."""
    return not any(number % 16 for t in map(rows_of, inputs) for number in (t.shape[-1], t.stride(0), t.data_ptr()))


@functools.lru_cache(maxsize=64)
def _index(start: int, stop: int, device: torch.device) -> Tensor:
    return torch.arange(start, stop, device=device)


def slot_tensor(slots: Tensor | slice, count: int, device: torch.device) -> Tensor:
    """Return the slots of R = `count` requests, [R] int64; the tensor of a slice is cached."""
    if isinstance(slots, slice):
        start = slots.start or 0
        return _index(start, start + count, device)
    return slots


def launch_with(kernel: Kernel, grid: tuple[int, ...], config: Config, given: Mapping[str, Argument]) -> None:
    """Launch a kernel with the `given` arguments that it declares; others are ignored."""
    taken = (*kernel.pointers, *kernel.strides, *kernel.counts, *kernel.scalars)
    kernel.launch(grid, config, **{name: given[name] for name in taken})


def prefill_arguments(
    chunks: PackedChunks, slots: StateSlots, live: Tensor, snapshots: Tensor | None
) -> dict[str, Tensor | int]:
    """Return the state arguments of prefill kernels, by parameter name.

    If no states are kept, stand-ins replace the lists of kept states and are not read.
    """
    kept, starts = slots.snapshots, chunks.sequences.cu_seqlens
    assert kept is None or snapshots is not None, "somewhere to keep them"
    pool = live if snapshots is None else snapshots
    return {
        "live": live,
        "snapshots": pool,
        "live_row": live.stride(0),
        "snapshot_row": pool.stride(0),
        "cu_seqlens": starts,
        "slots": slots.live,
        "has_initial": slots.has_initial_state,
        "kept_slots": starts if kept is None else kept.slots.contiguous(),
        "kept_sequences": starts if kept is None else kept.sequences.contiguous(),
        "kept_tokens": starts if kept is None else kept.tokens.contiguous(),
        "kept": 0 if kept is None else kept.slots.numel(),
    }


@functools.cache
def say_once(line: str) -> None:
    """Log a line once."""
    say(line)


def say_reference_computes(why: str) -> None:
    """Log, once for each reason, why the reference computes an operator instead of a kernel."""
    say_once(f"{why}; the reference computes it")
