"""What recurrent layers are told about an engine step, and what they need of its context; the same for every kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megatron_ext.ops.varlen import PackedChunks


@dataclass(frozen=True)
class SnapshotPlaces:
    """The n states inside a step's prefill that are to be kept, and where to."""

    slots: Tensor  # [n] int64, of the snapshot pool
    sequences: Tensor  # [n] int64, of the prefill
    chunks: Tensor  # [n] int64, the kernel chunk that ends there
    tokens: Tensor  # [n] int64, tokens of the packed prefill up to there


@dataclass(frozen=True)
class RecurrentStep:
    """What every recurrent layer is told about one engine step; staged once.

    The step's tokens are packed as [decode | prefill | padding]: the first `num_decode` tokens belong to one request
    each, then come the prefill sequences that `chunks` describes. Rows of live states are given per request.
    """

    num_decode: int
    decode_rows: Tensor | slice  # [num_decode] int64; a slice where they follow each other, so that states are views
    prefill_rows: Tensor  # [S] int64
    has_initial_state: Tensor  # [S] bool: False starts from zero, whatever the row holds
    chunks: PackedChunks | None  # None without prefill
    snapshots: SnapshotPlaces | None = None  # None if no states are to be kept


class RecurrentContext(Protocol):
    """The part of an inference context that a recurrent mixer uses."""

    recurrent_step: RecurrentStep

    def mamba_states_cache(self, layer_number: int) -> tuple[Tensor, Tensor]:
        """Live states of one layer: convolution [rows, Cn, K-1] and recurrent [rows, ...]; written in place."""

    def mamba_snapshots(self, layer_number: int) -> tuple[Tensor, Tensor]:
        """Snapshots of one layer, of the same shapes with slots for rows; written in place."""
