"""Chunks that end on a grid of absolute positions."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_ext.ops.varlen import PackedChunks, pack_chunks


def cut_lengths(start: int, length: int, chunk_size: int) -> list[int]:
    """Cut the tokens [start, start + length) of one sequence at every multiple of chunk_size."""
    first = min(length, chunk_size - start % chunk_size)
    whole, rest = divmod(length - first, chunk_size)
    return [first] + [chunk_size] * whole + ([rest] if rest else [])


def cut_chunks(
    starts: Sequence[int], lengths: Sequence[int], chunk_size: int, device: torch.device | str | None
) -> PackedChunks:
    """Cut packed sequences, of which so many tokens were done before, into chunks on the grid."""
    cuts = [cut_lengths(start, length, chunk_size) for start, length in zip(starts, lengths, strict=True)]
    return pack_chunks(cuts, device)
