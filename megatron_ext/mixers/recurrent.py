"""Input of recurrent layers for an engine step, their context, and kernel chunk boundaries; for every kind of mixer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megatron_ext.ops.state_slots import StateSlots
from megatron_ext.ops.varlen import PackedChunks


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
