"""Where prefill is cut into kernel chunks: on the grid of absolute positions, for every recurrent mixer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_ext.ops.varlen import PackedChunks, pack_chunks


def cut_lengths(start: int, length: int, chunk_size: int) -> list[int]:
    """Cut the tokens [start, start + length) of one sequence at every multiple of chunk_size.

    Args:
        start: Absolute position of the first token, that is, tokens of the sequence done before.
        length: Tokens to cut, at least 1.
        chunk_size: Grid width in tokens, at least 1.

    Returns:
        The lengths of the pieces; the first completes the chunk that earlier tokens began.

        >>> cut_lengths(1866, 1100, 2048)
        [182, 918]
    """
    assert start >= 0
    assert length >= 1
    assert chunk_size >= 1
    first = min(length, chunk_size - start % chunk_size)
    whole, rest = divmod(length - first, chunk_size)
    return [first] + [chunk_size] * whole + ([rest] if rest else [])


def cut_chunks(
    starts: Sequence[int], lengths: Sequence[int], chunk_size: int, device: torch.device | str | None
) -> PackedChunks:
    """Cut packed sequences into chunks of at most chunk_size tokens that end on the grid of absolute positions.

    So every position that is a multiple of chunk_size is the end of a chunk wherever prefill was cut before, and the
    state there is one of the per-chunk states.

    Args:
        starts: Absolute position of the first token of each sequence in this step.
        lengths: Tokens of each sequence in this step, each at least 1.
        chunk_size: Grid width in tokens: the kernel chunk (Mamba-2), or the block (Mamba-1).
        device: Where the index tensors go.
    """
    cuts = [cut_lengths(start, length, chunk_size) for start, length in zip(starts, lengths, strict=True)]
    return pack_chunks(cuts, device)
