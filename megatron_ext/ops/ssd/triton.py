"""Mamba-2's recurrence in Triton, for CUDA devices: reads and writes slots in place, with the kernels in `kernels.py`.

A slot of -1 marks a row or a sequence of padding: its decode rows are zeros, and no slot is touched.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megatron_ext.ops import triton
from megatron_ext.ops.backends import NoKernelError, say_once
from megatron_ext.ops.ssd import reference
from megatron_ext.ops.state_slots import DecodeStates, PrefillStates
from megatron_ext.ops.triton.kernel_registry import Argument
from megatron_ext.ops.triton.launching import (
    decode_arguments,
    launch_with,
    prefill_arguments,
    require_one_type,
    require_own_rows,
    rowed,
)


def _require(x: Tensor, B: Tensor, live: Tensor) -> None:
    """Raise `NoKernelError` unless a kernel supports these inputs."""
    from megatron_ext.ops.ssd import kernels

    max_states = max(one["N"] for one in kernels.ssd_decode.configs)
    if B.shape[-1] > max_states:
        raise NoKernelError(f"ssd has no kernel for states of {B.shape[-1]}, only for up to {max_states}")
    require_one_type("ssd", x, B)
    require_own_rows(live, "ssd")
    kernels.ssd_decode.require(T=x.dtype, S=live.dtype)


def _arguments(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None) -> dict[str, Argument]:
    """Return the arguments of both kernels; the stand-in for a missing D is not read."""
    (heads, head_dim), rates = x.shape[1:], A.float().contiguous()
    return rowed(x=x, dt=dt.float(), B=B, C=C) | {
        "A": rates,
        "D": rates if D is None else D.float().contiguous(),
        "head_dim": head_dim,
        "state_size": B.shape[2],
        "heads": heads,
        "heads_per_group": heads // B.shape[1],
        "has_skip": int(D is not None),
    }


def prefill(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, states: PrefillStates, *, D: Tensor | None = None
) -> Tensor:
    """Compute a prefill of the inputs of `reference.ssd_scan`."""
    _require(x, B, states.live)
    from megatron_ext.ops.ssd import kernels, tiles

    places = prefill_arguments(states)
    lack = tiles.lacks(x, B, C, states.chunks)
    if lack is None:
        return tiles.prefill(_arguments(x, dt, A, B, C, D) | places, x, B, states.chunks)
    if x.dtype != torch.float32:
        say_once(f"ssd converts inputs of a prefill to fp32 and computes them in order, which is slower: {lack}")
    state_size = B.shape[2]
    config = kernels.ssd_prefill.config_for(x.dtype, N=min(state_size, kernels.MAX_STATES))
    parts, (rows, heads, head_dim) = -(-state_size // config["N"]), x.shape
    y = x.new_zeros(parts, rows, heads, head_dim, dtype=torch.float32)
    given = _arguments(x.float(), dt, A, B.float(), C.float(), D) | places
    given |= {"y": y, "y_part": rows * heads * head_dim}
    grid = states.slots.live.numel(), heads, -(-head_dim // config["P"]) * parts
    launch_with(kernels.ssd_prefill, grid, config, given)
    return (y[0] if parts == 1 else y.sum(0)).to(x.dtype)


def _decode(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, states: DecodeStates, *, D: Tensor | None = None
) -> Tensor:
    _require(x, B, states.live)
    from megatron_ext.ops.ssd import kernels

    y, (rows, heads, head_dim) = x.new_empty(x.shape), x.shape
    config = kernels.ssd_decode.config_for(x.dtype, N=B.shape[2])
    given = _arguments(x, dt, A, B, C, D) | decode_arguments(states, x) | {"y": y}
    launch_with(kernels.ssd_decode, (rows, heads, -(-head_dim // config["P"])), config, given)
    return y


BACKEND = replace(reference.BACKEND, name=triton.NAME, takes=triton.takes, prefill=prefill, decode=_decode)
