"""Mamba-2's recurrence in Triton, for CUDA devices: reads and writes slots in place, with the kernels in `kernels.py`.

A slot of -1 marks a row or a sequence of padding: its decode rows are zeros, and no slot is touched.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ext.ops import triton
from megatron_ext.ops.recurrence import RecurrenceBackend, decode_by_step, prefill_by_scan
from megatron_ext.ops.ssd import reference
from megatron_ext.ops.state_slots import StateSlots
from megatron_ext.ops.triton.kernel_registry import Argument, Config, Kernel
from megatron_ext.ops.triton.launching import (
    launch_with,
    own_rows,
    prefill_arguments,
    rows_of,
    say_once,
    say_reference_computes,
    slot_tensor,
)
from megatron_ext.ops.varlen import PackedChunks


def _lacks(x: Tensor, B: Tensor, live: Tensor) -> str | None:
    """Return why there is no kernel for these inputs; None if there is one."""
    from megatron_ext.ops.ssd import kernels

    max_states = max(one["N"] for one in kernels.ssd_decode.configs)
    if B.shape[-1] > max_states:
        return f"ssd has no kernel for states of {B.shape[-1]}, only for up to {max_states}"
    if B.dtype != x.dtype:
        return f"ssd has no kernel for x of {x.dtype} and B and C of {B.dtype}"
    if not own_rows(live):
        return "ssd has no kernel for states that are not contiguous"
    return kernels.ssd_decode.lacks(T=x.dtype, S=live.dtype)


def _config(kernel: Kernel, x: Tensor, state_size: int) -> Config:
    found = kernel.fitting(x.dtype, N=state_size)
    assert found is not None, "there is a kernel for these states"
    return found


def _arguments(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None) -> dict[str, Argument]:
    """Return the arguments of both kernels; the stand-in for a missing D is not read."""
    x, dt, B, C = (rows_of(t) for t in (x, dt.float(), B, C))
    heads, head_dim = x.shape[1:]
    return {
        "x": x,
        "dt": dt,
        "A": A.float().contiguous(),
        "B": B,
        "C": C,
        "D": dt if D is None else D.float().contiguous(),
        "x_row": x.stride(0),
        "dt_row": dt.stride(0),
        "b_row": B.stride(0),
        "c_row": C.stride(0),
        "head_dim": head_dim,
        "state_size": B.shape[2],
        "heads": heads,
        "heads_per_group": heads // B.shape[1],
        "has_skip": int(D is not None),
    }


def prefill(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    chunks: PackedChunks,
    slots: StateSlots,
    live: Tensor,
    snapshots: Tensor | None,
    D: Tensor | None = None,
) -> Tensor:
    """Compute `Recurrence.prefill` for the inputs of `reference.ssd_scan`."""
    lack = _lacks(x, B, live)
    if lack is not None:
        say_reference_computes(lack)
        inputs = (x, dt, A, B, C)
        return prefill_by_scan(reference.ssd_scan, inputs, chunks, slots, live, snapshots, {"D": D})
    from megatron_ext.ops.ssd import kernels, tiles

    states = prefill_arguments(chunks, slots, live, snapshots)
    lack = tiles.lacks(x, B, C, chunks)
    if lack is None:
        return tiles.prefill(_arguments(x, dt, A, B, C, D) | states, x, B, chunks)
    if x.dtype != torch.float32:
        say_once(f"ssd converts inputs of a prefill to fp32 and computes them in order, which is slower: {lack}")
    state_size = B.shape[2]
    config = _config(kernels.ssd_prefill, x, min(state_size, kernels.MAX_STATES))
    parts, (rows, heads, head_dim) = -(-state_size // config["N"]), x.shape
    y = x.new_zeros(parts, rows, heads, head_dim, dtype=torch.float32)
    given = _arguments(x.float(), dt, A, B.float(), C.float(), D) | states
    given |= {"y": y, "y_part": rows * heads * head_dim}
    launch_with(kernels.ssd_prefill, (slots.live.numel(), heads, -(-head_dim // config["P"]) * parts), config, given)
    return (y[0] if parts == 1 else y.sum(0)).to(x.dtype)


def decode(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    slots: Tensor | slice,
    live: Tensor,
    D: Tensor | None = None,
) -> Tensor:
    """Compute `Recurrence.decode` for the inputs of `reference.ssd_step`."""
    lack = _lacks(x, B, live)
    if lack is not None:
        say_reference_computes(lack)
        return decode_by_step(reference.ssd_step, (x, dt, A, B, C), slots, live, {"D": D})
    from megatron_ext.ops.ssd import kernels

    config, y, (rows, heads, head_dim) = _config(kernels.ssd_decode, x, B.shape[2]), x.new_empty(x.shape), x.shape
    kernels.ssd_decode.launch(
        (rows, heads, -(-head_dim // config["P"])),
        config,
        y=y,
        live=live,
        live_row=live.stride(0),
        slots=slot_tensor(slots, rows, x.device),
        **_arguments(x, dt, A, B, C, D),
    )
    return y


BACKEND = RecurrenceBackend(
    triton.NAME, triton.takes, reference.ssd_scan, reference.ssd_step, prefill=prefill, decode=decode
)
