"""Mamba-2's prefill in Triton, parallel over tiles of tokens: launches of `kernels_tiles.py`, and their buffers.

Supports 16-bit inputs if states are resumed at multiples of a tile (blocks of 64 tokens, and multiples of that); other
prefills are computed in order (`kernels.py`). The choice depends on the model and on the block size.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_ext.ops.triton.kernel_registry import Argument
from megatron_ext.ops.triton.launching import is_aligned, launch_with, tile_count
from megatron_ext.ops.varlen import PackedChunks, PackedSequences

WRITTEN_DOWN = {torch.bfloat16: torch.bfloat16, torch.float16: torch.float32}
"""Type of the inputs -> type of the states passed between the kernels; fp16 overflows on the largest states."""
MAX_HEADS = 8
"""Maximum number of heads that one program of outputs computes in turn; they share B, C and their product."""


def lacks(x: Tensor, B: Tensor, C: Tensor, chunks: PackedChunks) -> str | None:
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


def prefill(arguments: Mapping[str, Argument], x: Tensor, B: Tensor, chunks: PackedChunks) -> Tensor:
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

    assert chunks.resumes is not None, "see `lacks`"
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
