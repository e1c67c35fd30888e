"""Kernel chunk boundaries of sequences, in training and in the prefill of a step, for every recurrent mixer."""

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

    Used in training, where sequences begin at 0.

    Args:
        starts: Absolute position of the first token of each sequence in this step.
        lengths: Tokens of each sequence in this step, each at least 1.
        chunk_size: Grid width in tokens.
        device: Device of the index tensors.
    """
    cuts = [cut_lengths(start, length, chunk_size) for start, length in zip(starts, lengths, strict=True)]
    return pack_chunks(cuts, device)


def cut_between(start: int, length: int, chunk_size: int, stops: Sequence[int]) -> list[int]:
    """Cut the tokens [start, start + length) of one sequence at `stops`, and evenly between them.

    Used in the prefill of a step. Results do not depend on where chunks end, so no other boundaries are needed (HY-9).

    Args:
        start: Absolute position of the first token, that is, tokens of the sequence done before.
        length: Tokens to cut, at least 1.
        chunk_size: The most tokens of a piece, at least 1.
        stops: Ascending positions in (start, start + length] whose states are wanted.

    Returns:
        The lengths of the pieces, as few as possible; those between two stops differ by one token at most.

        >>> cut_between(1866, 1100, 2048, [2048])
        [182, 918]
        >>> cut_between(0, 150, 64, [])
        [50, 50, 50]
    """
    pieces = []
    for end in dict.fromkeys([*stops, start + length]):
        count = -(-(end - start) // chunk_size)
        shortest, longer = divmod(end - start, count)
        pieces += [shortest + 1] * longer + [shortest] * (count - longer)
        start = end
    return pieces
