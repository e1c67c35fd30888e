"""Kernel chunks in fixed places: as many for each sequence, filled as far as there are tokens.

A step's facts usually have the shapes of its prompts. Here shapes follow from the most that there may be: S sequences
of m chunks with C places each. Chunks that are not needed are empty: places without a token neither decay nor add
anything, so a state passes them as it is. What is inside the tensors may change; nothing on the host depends on it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ext.ops.chunk_padding import PIECE, PaddedChunks, PaddedPlaces, Pieces, cut_into_pieces, pad_chunks
from megatron_ext.ops.varlen import BoundedSequences, PackedChunks, Resumes


@dataclass(frozen=True)
class ChunkGrid:
    """S sequences of m chunks with C places, over T tokens."""

    sequences: int
    chunks: int
    places: int
    tokens: int

    @property
    def count(self) -> int:
        """Chunks of all sequences, n."""
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
    """The facts of a prefill over tensors that somebody fills anew for each step.

    Args:
        grid: What there is room for.
        cu_seqlens: [S+1] int64, first token of each sequence, and the end of the last one.
        seq_idx: [T] int64, the sequence of each token; behind the last sequence any.
        cu_chunk_seqlens: [n+1] int64, first token of each chunk; an empty one begins where the next one does.
        tokens: [n*C] int64, the token at each place; one of the same sequence where there is none.
        is_padding: [n*C] bool, True at places without a token.
        place_of_token: [T] int64, the place of each token; behind the last sequence any.
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
    """The same places as pieces of `width`: only counts and places are read of these, not where a piece begins."""
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
