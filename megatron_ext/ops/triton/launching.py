"""Shared parts of kernel launches: arguments for state slots and for tensors with contiguous rows.

A slot of -1 marks a row or a sequence of padding: its outputs in decode are zeros, and no slot is touched.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from megatron_ext.ops.backends import NoKernelError
from megatron_ext.ops.state_slots import DecodeStates, PrefillStates
from megatron_ext.ops.triton.kernel_registry import Argument, Kernel


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


def rowed(**inputs: Tensor) -> dict[str, Argument]:
    """Return inputs [T, ...] with contiguous rows, by name, and the stride of each as `<name in lower case>_row`."""
    rows = {name: rows_of(t) for name, t in inputs.items()}
    return {**rows, **{f"{name.lower()}_row": t.stride(0) for name, t in rows.items()}}


def require_one_type(operator: str, *inputs: Tensor | None) -> None:
    """Raise `NoKernelError` unless all inputs, missing ones left out, are of one type."""
    types = dict.fromkeys(t.dtype for t in inputs if t is not None)
    if len(types) > 1:
        raise NoKernelError(f"{operator} has no kernel for inputs of {' and '.join(map(str, types))}")


def require_states(kernel: Kernel, live: Tensor, *inputs: Tensor | None, **sizes: int) -> None:
    """Raise `NoKernelError` unless a kernel supports these inputs and states.

    Args:
        kernel: Kernel with types T of inputs and S of states.
        live: States, which must be contiguous in each slot.
        inputs: Inputs, which must be of one type.
        sizes: Sizes that a constant of the kernel must reach, by its name.
    """
    require_one_type(kernel.name, *inputs)
    if not own_rows(live):
        raise NoKernelError(f"{kernel.name} has no kernel for states that are not contiguous")
    kernel.require(T=next(t.dtype for t in inputs if t is not None), S=live.dtype)
    for name, size in sizes.items():
        most = max(one[name] for one in kernel.configs)
        if size > most:
            raise NoKernelError(f"{kernel.name} has no kernel for {name} of {size}, only for up to {most}")


def is_aligned(*inputs: Tensor) -> bool:
    """Return whether inputs [T, heads, channels] begin at multiples of 16 bytes, rows and heads at 16 elements."""
    return not any(number % 16 for t in map(rows_of, inputs) for number in (t.shape[-1], t.stride(0), t.data_ptr()))


@functools.lru_cache(maxsize=64)
def _index(start: int, stop: int, device: torch.device) -> Tensor:
    return torch.arange(start, stop, device=device)


def decode_arguments(states: DecodeStates, x: Tensor) -> dict[str, Argument]:
    """Return the state arguments of decode kernels, by parameter name; the slots of a slice are cached.

    Args:
        states: Running states.
        x: An input [R, ...].
    """
    slots = states.slots
    if isinstance(slots, slice):
        start = slots.start or 0
        slots = _index(start, start + x.shape[0], x.device)
    return {"live": states.live, "live_row": states.live.stride(0), "slots": slots}


def prefill_arguments(states: PrefillStates) -> dict[str, Argument]:
    """Return the state arguments of prefill kernels, by parameter name.

    If no states are kept, stand-ins replace the lists of kept states and are not read.
    """
    chunks, slots, live, snapshots = states
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
        "kept_offsets": starts if kept is None else kept.offsets.contiguous(),
        "kept_tokens": starts if kept is None else kept.tokens.contiguous(),
        "kept": 0 if kept is None else kept.slots.numel(),
    }
