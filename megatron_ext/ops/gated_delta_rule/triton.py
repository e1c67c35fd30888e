"""Gated delta rule in Triton, for CUDA devices: reads and writes slots in place, with the kernels in `kernels.py`.

A slot of -1 marks a row or a sequence of padding: its outputs are zeros, and no slot is touched.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megatron_ext.ops import triton
from megatron_ext.ops.backends import NoKernelError
from megatron_ext.ops.gated_delta_rule import reference
from megatron_ext.ops.state_slots import DecodeStates, PrefillStates
from megatron_ext.ops.triton.kernel_registry import Argument
from megatron_ext.ops.triton.launching import (
    decode_arguments,
    is_aligned,
    launch_with,
    prefill_arguments,
    require_one_type,
    require_own_rows,
    rowed,
    tile_count,
)

MAX_KEYS = 128
SCALES = ("key_lengths", "reads", "asks", "writes", "fades")
"""Results of `delta_tiles` for each token and head, [T, H] each."""


def _arguments(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, live: Tensor, normalize: bool
) -> dict[str, Argument]:
    """Return the kernels' arguments by parameter name.

    Raises:
        NoKernelError: There is no kernel for them.
    """
    from megatron_ext.ops.gated_delta_rule import kernels

    (heads, value_dim), (groups, key_dim) = v.shape[1:], k.shape[1:]
    if key_dim > MAX_KEYS:
        raise NoKernelError(
            f"the gated delta rule has no kernel for keys of {key_dim} channels, only for up to {MAX_KEYS}"
        )
    if key_dim > kernels.MAX_ODD_KEYS and not is_aligned(q, k, v):
        raise NoKernelError(
            f"the gated delta rule has no kernel for {key_dim} and {value_dim} channels, only for multiples of 16"
        )
    require_one_type("the gated delta rule", q, v)
    require_own_rows(live, "the gated delta rule")
    kernels.delta_prefill.require(T=q.dtype, S=live.dtype)
    return rowed(q=q, k=k, v=v, g=g.float(), beta=beta.float()) | {
        "key_dim": key_dim,
        "value_dim": value_dim,
        "heads": heads,
        "heads_per_group": heads // groups,
        "normalize": int(normalize),
        "scale": key_dim**-0.5,
    }


def _prefill(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: PrefillStates, *, normalize: bool = False
) -> Tensor:
    arguments = _arguments(q, k, v, g, beta, states.live, normalize) | prefill_arguments(states)
    from megatron_ext.ops.gated_delta_rule import kernels

    tiling, config = kernels.delta_tiles.config_for(q.dtype), kernels.delta_prefill.config_for(q.dtype, K=k.shape[2])
    (tokens, heads, value_dim), sequences, tile = v.shape, states.slots.live.numel(), config["TILE"]
    solved, mixed = torch.empty(2, tokens, heads, tile, dtype=torch.float32, device=v.device)
    scales = torch.empty(len(SCALES), tokens, heads, dtype=torch.float32, device=v.device)
    y = torch.zeros(v.shape, dtype=v.dtype, device=v.device)  # also rows after the last sequence
    arguments |= {"y": y, "solved": solved, "mixed": mixed, "sequences": sequences}
    arguments |= dict(zip(SCALES, scales, strict=True))
    launch_with(kernels.delta_tiles, (tile_count(tokens, sequences, 1, tile), heads), tiling, arguments)
    launch_with(kernels.delta_prefill, (sequences, heads, -(-value_dim // config["V"])), config, arguments)
    return y


def _decode(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: DecodeStates, *, normalize: bool = False
) -> Tensor:
    arguments = _arguments(q, k, v, g, beta, states.live, normalize) | decode_arguments(states, v)
    from megatron_ext.ops.gated_delta_rule import kernels

    y, (rows, heads, value_dim) = torch.empty(v.shape, dtype=v.dtype, device=v.device), v.shape
    config = kernels.delta_decode.config_for(q.dtype, K=k.shape[2])
    launch_with(kernels.delta_decode, (rows, heads, -(-value_dim // config["V"])), config, arguments | {"y": y})
    return y


BACKEND = replace(reference.BACKEND, name=triton.NAME, takes=triton.takes, prefill=_prefill, decode=_decode)
