"""Input of recurrent layers for an engine step, and the context that they need; common to all kinds of mixers."""

from __future__ import annotations

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
