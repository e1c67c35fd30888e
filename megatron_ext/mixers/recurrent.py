"""Input of recurrent layers for an engine step, their context, and kernel chunk boundaries; for every kind of mixer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron_ext.ops.state_slots import StateSlots
from megatron_ext.ops.varlen import PackedChunks, pack_chunks


@dataclass(frozen=True)
class RecurrentStep:
    """Metadata of one engine step for its recurrent layers; staged once.

    The step's tokens are packed as [decode | prefill | padding]: the first `num_decode` tokens belong to one request
    each, then come the prefill sequences that `chunks` describes.

    Attributes:
        num_decode: Requests that decode.
        decode_slots: Running state slots of decoding requests, [num_decode] int64; a slice if consecutive, so that
            states are views.
        chunks: Prefill sequences, cut into kernel chunks; None without prefill.
        prefill_slots: State slots of the prefill sequences; None without prefill.
    """

    num_decode: int
    decode_slots: Tensor | slice
    chunks: PackedChunks | None
    prefill_slots: StateSlots | None


class RecurrentContext(Protocol):
    """Part of an inference context that a recurrent mixer uses."""

    recurrent_step: RecurrentStep

    def mamba_states_cache(self, layer_number: int) -> tuple[Tensor, Tensor]:
        """Running states of one layer: convolution [slots, Cn, K-1] and recurrent [slots, ...]; written in place."""

    def mamba_snapshots(self, layer_number: int) -> tuple[Tensor, Tensor]:
        """Snapshots of one layer, of the same shapes but in separate slots; written in place."""


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
