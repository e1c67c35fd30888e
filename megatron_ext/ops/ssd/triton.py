"""Mamba-2's recurrence in Triton, for CUDA devices: reads and writes slots in place.

A slot of -1 marks a row or a sequence of padding: its decode rows are zeros, and no slot is touched.

Prefills of 16-bit inputs are parallel over tiles of tokens (`kernels_tiles.py`) if states are resumed at multiples of
a tile (blocks of 64 tokens, and multiples of that); others are computed in order (`kernels.py`). The choice depends on
the model and on the block size.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    is_aligned,
    launch_with,
    prefill_arguments,
    require_one_type,
    require_own_rows,
    rowed,
    tile_count,
)
from megatron_ext.ops.varlen import PackedChunks, PackedSequences


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


WRITTEN_DOWN = {torch.bfloat16: torch.bfloat16, torch.float16: torch.float32}
"""Type of the inputs -> type of the states passed between the kernels; fp16 overflows on the largest states."""
MAX_HEADS = 8
"""Maximum number of heads that one program of outputs computes in turn; they share B, C and their product."""


def _tiles_lack(x: Tensor, B: Tensor, C: Tensor, chunks: PackedChunks) -> str | None:
    """Return why these kernels do not support the inputs; None if they do."""
    from megatron_ext.ops.ssd import kernels_tiles as kernels

    if x.dtype not in WRITTEN_DOWN:
        return f"inputs are of {x.dtype}"
    if chunks.resumes is None or chunks.resumes.multiple % kernels.TILE:
        length = "any number of" if chunks.resumes is None else chunks.resumes.multiple
        return f"blocks have {length} tokens, not a multiple of {kernels.TILE}"
    if kernels.chunk_scan.fitting(x.dtype, N=B.shape[2]) is None:
        return f"there are {B.shape[2]} states of {x.dtype}"
    if not is_aligned(x, B, C):
        return f"{x.shape[2]} channels and {B.shape[2]} states do not lie at multiples of 16"
    return None


def _prefill_tiles(arguments: Mapping[str, Argument], x: Tensor, B: Tensor, chunks: PackedChunks) -> Tensor:
    """Compute outputs [T, H, P]; states are read and written in place.

    Temporary buffers hold the state of a head for every tile, T / 64 + 2 S of them, in `WRITTEN_DOWN` types: 338 MB for
    16,384 tokens of 80 heads of 64 x 128 states in bf16; and 16 bytes for each token and head.

    Args:
        arguments: Arguments of the kernels by name: inputs, their strides and sizes, and the `prefill_arguments`.
        x: [T, H, P].
        B: [T, G, N].
        chunks: Chunks with `resumes`.
    """
    from megatron_ext.ops.ssd import kernels_tiles as kernels

    assert chunks.resumes is not None, "see `_tiles_lack`"
    (rows, heads, head_dim), (groups, state_size) = x.shape, B.shape[1:]
    tile, ends = kernels.TILE, chunks.resumes.ends
    sequences = ends.numel()
    tiles = tile_count(rows, sequences, 1, tile, kernels.LEAST.value)
    high, low, steps, weights = torch.empty(4, tiles, heads, tile, dtype=torch.float32, device=x.device)
    runs = -(-(heads // groups) // MAX_HEADS)
    y = _outputs(x, chunks.sequences)
    given = {
        **arguments,
        "y": y,
        "entering": x.new_empty(tiles, heads, head_dim, state_size, dtype=WRITTEN_DOWN[x.dtype]),
        "high": high,
        "low": low,
        "steps": steps,
        "weights": weights,
        "ends": ends,
        "sequences": sequences,
        "heads_each": -(-(heads // groups) // runs),
    }
    config = kernels.chunk_cumsum.config_for(x.dtype)
    launch_with(kernels.chunk_cumsum, (tiles, -(-heads // config["HEADS"])), config, given)
    config = kernels.state_passing.config_for(x.dtype)
    parts = -(-head_dim // config["P"]) * -(-state_size // config["N"])
    launch_with(kernels.state_passing, (heads * parts, sequences), config, given)
    config = kernels.chunk_scan.config_for(x.dtype, N=state_size)
    launch_with(kernels.chunk_scan, (groups * runs, tiles, -(-head_dim // config["P"])), config, given)
    return y


def _outputs(x: Tensor, sequences: PackedSequences) -> Tensor:
    """Allocate the outputs, with zeros after the last sequence: everywhere if only the device knows its end."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    y[0 if sequences.has_static_shapes else sequences.num_tokens :].zero_()
    return y


def prefill(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, states: PrefillStates, *, D: Tensor | None = None
) -> Tensor:
    """Compute a prefill of the inputs of `reference.ssd_scan`."""
    _require(x, B, states.live)
    from megatron_ext.ops.ssd import kernels

    places = prefill_arguments(states)
    lack = _tiles_lack(x, B, C, states.chunks)
    if lack is None:
        return _prefill_tiles(_arguments(x, dt, A, B, C, D) | places, x, B, states.chunks)
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
