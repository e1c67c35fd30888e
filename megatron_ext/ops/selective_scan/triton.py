"""Mamba-1's recurrence in Triton, for CUDA devices: reads and writes slots in place, with the kernels in `kernels.py`.

A slot of -1 marks a row or a sequence of padding: its decode rows are zeros, and no slot is touched.
"""

from __future__ import annotations

from torch import Tensor

from megatron_ext.ops import triton
from megatron_ext.ops.recurrence import RecurrenceBackend, decode_by_step, prefill_by_scan
from megatron_ext.ops.selective_scan import reference
from megatron_ext.ops.state_slots import StateSlots
from megatron_ext.ops.triton.kernel_registry import Argument, Config, Kernel
from megatron_ext.ops.triton.launching import (
    own_rows,
    prefill_arguments,
    rows_of,
    say_reference_computes,
    slot_tensor,
)
from megatron_ext.ops.varlen import PackedChunks


def _lacks(u: Tensor, B: Tensor, live: Tensor) -> str | None:
    """Return why there is no kernel for these inputs; None if there is one."""
    from megatron_ext.ops.selective_scan import kernels

    max_states = max(one["N"] for one in kernels.selective_prefill.configs)
    if B.shape[-1] > max_states:
        return f"the selective scan has no kernel for states of {B.shape[-1]}, only for up to {max_states}"
    if B.dtype != u.dtype:
        return f"the selective scan has no kernel for u of {u.dtype} and B and C of {B.dtype}"
    if not own_rows(live):
        return "the selective scan has no kernel for states that are not contiguous"
    return kernels.selective_prefill.lacks(T=u.dtype, S=live.dtype)


def _config(kernel: Kernel, u: Tensor, state_size: int) -> Config:
    found = kernel.fitting(u.dtype, N=state_size)
    assert found is not None, "there is a kernel for these states"
    return found


def _arguments(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None) -> dict[str, Argument]:
    """Return the arguments of both kernels; the stand-in for a missing D is not read."""
    u, delta, B, C = (rows_of(t) for t in (u, delta.float(), B, C))
    return {
        "u": u,
        "delta": delta,
        "A": A.float().contiguous(),
        "B": B,
        "C": C,
        "D": delta if D is None else D.float().contiguous(),
        "u_row": u.stride(0),
        "delta_row": delta.stride(0),
        "b_row": B.stride(0),
        "c_row": C.stride(0),
        "channels": u.shape[1],
        "state_size": B.shape[1],
        "has_skip": int(D is not None),
    }


def prefill(
    u: Tensor,
    delta: Tensor,
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
    """Compute `Recurrence.prefill` for the inputs of `reference.selective_scan`."""
    lack = _lacks(u, B, live)
    if lack is not None:
        say_reference_computes(lack)
        inputs = (u, delta, A, B, C)
        return prefill_by_scan(reference.selective_scan, inputs, chunks, slots, live, snapshots, {"D": D})
    from megatron_ext.ops.selective_scan import kernels

    config, y = _config(kernels.selective_prefill, u, B.shape[1]), u.new_zeros(u.shape)
    kernels.selective_prefill.launch(
        (slots.live.numel(), -(-u.shape[1] // config["CHANNELS"])),
        config,
        y=y,
        **_arguments(u, delta, A, B, C, D),
        **prefill_arguments(chunks, slots, live, snapshots),
    )
    return y


def decode(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    slots: Tensor | slice,
    live: Tensor,
    D: Tensor | None = None,
) -> Tensor:
    """Compute `Recurrence.decode` for the inputs of `reference.selective_scan_step`."""
    lack = _lacks(u, B, live)
    if lack is not None:
        say_reference_computes(lack)
        return decode_by_step(reference.selective_scan_step, (u, delta, A, B, C), slots, live, {"D": D})
    from megatron_ext.ops.selective_scan import kernels

    config, y = _config(kernels.selective_decode, u, B.shape[1]), u.new_empty(u.shape)
    kernels.selective_decode.launch(
        (u.shape[0], -(-u.shape[1] // config["CHANNELS"])),
        config,
        y=y,
        live=live,
        live_row=live.stride(0),
        slots=slot_tensor(slots, u.shape[0], u.device),
        **_arguments(u, delta, A, B, C, D),
    )
    return y


BACKEND = RecurrenceBackend(
    triton.NAME, triton.takes, reference.selective_scan, reference.selective_scan_step, prefill=prefill, decode=decode
)
