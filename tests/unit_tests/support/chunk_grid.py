"""Chunks that end on a grid of absolute positions, and the states to keep at their ends."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_ext.ops.state_slots import SnapshotPlaces
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


def snapshot_places(
    rows: Sequence[tuple[int, int, int, int]],
    sequences: int,
    device: torch.device | str = "cpu",
    padding: Sequence[tuple[int, int]] = (),
) -> SnapshotPlaces | None:
    """Return states to keep: rows of sequence, tokens, slot and chunk, in any order; None without any.

    Args:
        rows: States of the sequences.
        sequences: Number of sequences of the prefill.
        device: Device of the tensors.
        padding: Tokens and slot of entries that belong to no sequence.
    """
    if not rows:
        return None
    entries = [*sorted(rows), *((sequences, *one, 0) for one in padding)]
    owners, tokens, slots, chunks = torch.tensor(entries, device=device).T.contiguous()
    offsets = torch.searchsorted(owners, torch.arange(sequences + 1, device=device))
    return SnapshotPlaces(slots, offsets, chunks, tokens)
