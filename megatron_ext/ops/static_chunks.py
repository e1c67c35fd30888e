"""Kernel chunks with static shapes: the same number for each sequence, filled as far as there are tokens.

The metadata of a step usually has the shapes of its prompts. Here shapes follow from upper bounds: S sequences of m
chunks with C places each. Surplus chunks are empty: places without a token neither decay nor add anything, so a state
passes them unchanged. The contents of the tensors may change; nothing on the host depends on them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ext.ops.chunk_padding import PIECE, PaddedChunks, PaddedPlaces, Pieces, cut_into_pieces, pad_chunks
from megatron_ext.ops.varlen import BoundedSequences, PackedChunks, Resumes


@dataclass(frozen=True)
class ChunkGrid:
    """Grid of S sequences of m chunks with C places, over T tokens."""

    sequences: int
    chunks: int
    places: int
    tokens: int

    @property
    def count(self) -> int:
        """Number of chunks of all sequences, n."""
        return self.sequences * self.chunks


def static_chunks(
    grid: ChunkGrid,
    cu_seqlens: Tensor,
    seq_idx: Tensor,
    cu_chunk_seqlens: Tensor,
    tokens: Tensor,
    is_padding: Tensor,
    place_of_token: Tensor,
    resumes: Resumes | None = None,
) -> PackedChunks:
    """Return prefill metadata over static tensors, which the caller refills for each step.

    Args:
        grid: Sizes of the tensors.
        cu_seqlens: [S+1] int64, first token of each sequence, and the end of the last one.
        seq_idx: [T] int64, the sequence of each token; arbitrary after the last sequence.
        cu_chunk_seqlens: [n+1] int64, first token of each chunk; an empty chunk begins at the start of the next one.
        tokens: [n*C] int64, the token at each place; any token of the same sequence at places without one.
        is_padding: [n*C] bool, True at places without a token.
        place_of_token: [T] int64, the place of each token; arbitrary after the last sequence.
        resumes: See `PackedChunks`.
    """
    device, count = cu_seqlens.device, grid.count
    sequences = BoundedSequences((grid.tokens,) * grid.sequences, cu_seqlens, seq_idx)
    numbers = torch.arange(count, device=device)
    chunks = PackedChunks(
        sequences=sequences,
        chunk_lengths=(grid.places,) * count,
        chunk_counts=(grid.chunks,) * grid.sequences,
        cu_chunk_seqlens=cu_chunk_seqlens,
        chunk_seq_idx=torch.div(numbers, grid.chunks, rounding_mode="floor"),
        last_chunk_indices=numbers[grid.chunks - 1 :: grid.chunks],
        resumes=resumes,
    )
    chunks.provide(pad_chunks, _padding(grid.places, tokens, is_padding, place_of_token))
    width = PIECE if grid.places % PIECE == 0 else grid.places
    pieces = _pieces(chunks, grid, width)
    pieces.packed.provide(pad_chunks, _padding(width, tokens, is_padding, place_of_token))
    chunks.provide(cut_into_pieces, pieces)
    return chunks


def _padding(width: int, tokens: Tensor, is_padding: Tensor, place_of_token: Tensor) -> PaddedChunks:
    return PaddedChunks(width, PaddedPlaces(tokens, is_padding.view(-1, width), place_of_token), None)


def _pieces(chunks: PackedChunks, grid: ChunkGrid, width: int) -> Pieces:
    """Return the same places as pieces of `width`; only counts and places of pieces are used, not their starts."""
    each = grid.places // width
    numbers = torch.arange(grid.count * each, device=chunks.cu_chunk_seqlens.device)
    packed = PackedChunks(
        sequences=chunks.sequences,
        chunk_lengths=(width,) * (grid.count * each),
        chunk_counts=(grid.chunks * each,) * grid.sequences,
        cu_chunk_seqlens=numbers,
        chunk_seq_idx=torch.div(numbers, grid.chunks * each, rounding_mode="floor"),
        last_chunk_indices=numbers[grid.chunks * each - 1 :: grid.chunks * each],
    )
    return Pieces(packed, numbers[each - 1 :: each])
