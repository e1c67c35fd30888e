"""Mamba-1's recurrence in Triton, for CUDA devices: reads and writes slots in place, with the kernels in `kernels.py`.

A slot of -1 marks a row or a sequence of padding: its decode rows are zeros, and no slot is touched.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from megatron_ext.ops import triton
from megatron_ext.ops.backends import NoKernelError
from megatron_ext.ops.selective_scan import reference
from megatron_ext.ops.state_slots import DecodeStates, PrefillStates
from megatron_ext.ops.triton.kernel_registry import Argument, Kernel
from megatron_ext.ops.triton.launching import (
    decode_arguments,
    launch_with,
    prefill_arguments,
    require_one_type,
    require_own_rows,
    rowed,
)


def _arguments(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, live: Tensor, D: Tensor | None
) -> dict[str, Argument]:
    """Return the arguments of both kernels; the stand-in for a missing D is not read.

    Raises:
        NoKernelError: There is no kernel for them.
    """
    from megatron_ext.ops.selective_scan import kernels

    max_states = max(one["N"] for one in kernels.selective_prefill.configs)
    if B.shape[-1] > max_states:
        raise NoKernelError(
            f"the selective scan has no kernel for states of {B.shape[-1]}, only for up to {max_states}"
        )
    require_one_type("the selective scan", u, B)
    require_own_rows(live, "the selective scan")
    kernels.selective_prefill.require(T=u.dtype, S=live.dtype)
    rates = A.float().contiguous()
    return rowed(u=u, delta=delta.float(), B=B, C=C) | {
        "A": rates,
        "D": rates if D is None else D.float().contiguous(),
        "channels": u.shape[1],
        "state_size": B.shape[1],
        "has_skip": int(D is not None),
    }


def _launch(kernel: Kernel, count: int, u: Tensor, B: Tensor, given: dict[str, Argument]) -> None:
    """Launch for `count` sequences or requests."""
    config = kernel.config_for(u.dtype, N=B.shape[1])
    launch_with(kernel, (count, -(-u.shape[1] // config["CHANNELS"])), config, given)


def prefill(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, states: PrefillStates, *, D: Tensor | None = None
) -> Tensor:
    """Compute a prefill of the inputs of `reference.selective_scan`."""
    given, y = _arguments(u, delta, A, B, C, states.live, D), u.new_zeros(u.shape)
    from megatron_ext.ops.selective_scan import kernels

    given |= prefill_arguments(states) | {"y": y}
    _launch(kernels.selective_prefill, states.slots.live.numel(), u, B, given)
    return y


def _decode(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, states: DecodeStates, *, D: Tensor | None = None
) -> Tensor:
    given, y = _arguments(u, delta, A, B, C, states.live, D), u.new_empty(u.shape)
    from megatron_ext.ops.selective_scan import kernels

    _launch(kernels.selective_decode, u.shape[0], u, B, given | decode_arguments(states, u) | {"y": y})
    return y


BACKEND = replace(reference.BACKEND, name=triton.NAME, takes=triton.takes, prefill=prefill, decode=_decode)
