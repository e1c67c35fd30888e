"""Metadata of a step, and the layout of sequences, and of the kernel chunks they are cut into, on its token axis.

Everything is computed on the host with numpy and reaches the device in a single copy; nothing is read back.
T tokens of the packed step, S sequences, n chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

Made = TypeVar("Made")
Own = TypeVar("Own", bound="StepMetadata")


class StepMetadata:
    """Base of frozen dataclasses with the layout of one step: lengths, cumulative lengths, block tables.

    The metadata is the same for every backend. Derived data of a backend (gather indices, padded layouts, tiles) is
    computed when its first layer requests it, and shared by all later layers of the step.
    """

    def prepared(self: Own, make: Callable[[Own], Made]) -> Made:
        """Return `make(self)`, computed once and cached."""
        made = self.__dict__.setdefault("_prepared", {})
        if make not in made:
            made[make] = make(self)
        return made[make]

    def provide(self: Own, make: Callable[[Own], Made], found: Made) -> None:
        """Set the result of `prepared(make)` to a value computed elsewhere, such as in static buffers."""
        self.__dict__.setdefault("_prepared", {})[make] = found


def to_device(tensor: Tensor, device: torch.device | str | None) -> Tensor:
    """Copy a host tensor to a device; returns the tensor itself if the device is the host.

    Copies to CUDA go through pinned memory, which torch reuses only after the copy is done: any other copy waits for
    all previously enqueued work.
    """
    if device is None or torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True)
class PackedSequences(StepMetadata):
    """S consecutive sequences on the token axis.

    Attributes:
        lengths: Tokens of each sequence, on the host, each at least 1.
        cu_seqlens: [S+1] int64, first token of each sequence, then T.
        seq_idx: [T] int64, the sequence that each token belongs to.
        has_static_shapes: Whether `lengths` are upper bounds; `cu_seqlens` on the device is exact then, and the token
            axis T may have rows after the last sequence.
    """

    lengths: tuple[int, ...]
    cu_seqlens: Tensor
    seq_idx: Tensor
    has_static_shapes: bool = False

    @property
    def num_tokens(self) -> int:
        """Number of tokens T, without the padding that may follow on the token axis."""
        return self.seq_idx.numel()


@dataclass(frozen=True)
class Resumes:
    """Places at which states may be resumed: cutting sequences there must not change results.

    Attributes:
        multiple: Block size in tokens; such places are multiples of it in absolute position.
        ends: [S] int64, absolute position after the last token of each sequence in this step.
    """

    multiple: int
    ends: Tensor


@dataclass(frozen=True)
class PackedChunks(StepMetadata):
    """Sequences cut into kernel chunks; no chunk holds tokens of two sequences.

    Attributes:
        sequences: Sequences that were cut.
        chunk_lengths: Tokens of each chunk, on the host, in token order.
        chunk_counts: Chunks of each sequence, on the host.
        cu_chunk_seqlens: [n+1] int64, first token of each chunk, then T.
        chunk_seq_idx: [n] int64, the sequence of each chunk.
        last_chunk_indices: [S] int64, the last chunk of each sequence.
        resumes: Places at which states may be resumed; None if unknown.
    """

    sequences: PackedSequences
    chunk_lengths: tuple[int, ...]
    chunk_counts: tuple[int, ...]
    cu_chunk_seqlens: Tensor
    chunk_seq_idx: Tensor
    last_chunk_indices: Tensor
    resumes: Resumes | None = None

    @property
    def longest(self) -> int:
        """Length C of the longest chunk, in tokens (which may be less than the chunk size used for cutting)."""
        return max(self.chunk_lengths)


def pack_chunks(pieces: Sequence[Sequence[int]], device: torch.device | str | None) -> PackedChunks:
    """Lay out sequences that are already cut: pieces[i] are the lengths (tokens, at least 1) of sequence i's chunks."""
    assert min(map(min, pieces)) >= 1, "every chunk holds a token"
    return packed_chunks(pieces, stage_arrays(chunk_arrays(pieces), device))


def chunk_arrays(pieces: Sequence[Sequence[int]]) -> dict[str, np.ndarray]:
    """Return the arrays that `packed_chunks` takes.

    Args:
        pieces: Lengths in tokens of the chunks of each sequence; 0 for an empty chunk.
    """
    counts, lengths = [len(cut) for cut in pieces], [sum(cut) for cut in pieces]
    assert min(lengths) >= 1, "every sequence holds a token"
    return {
        "cu_seqlens": starts(lengths),
        "seq_idx": np.repeat(np.arange(len(lengths)), lengths),
        "cu_chunk_seqlens": starts([length for cut in pieces for length in cut]),
        "chunk_seq_idx": np.repeat(np.arange(len(counts)), counts),
        "last_chunk_indices": np.cumsum(counts) - 1,
    }


def packed_chunks(
    pieces: Sequence[Sequence[int]], staged: Mapping[str, Tensor], resumes: Resumes | None = None
) -> PackedChunks:
    """Return the metadata of sequences in chunks of these lengths, whose `chunk_arrays` are on the device."""
    lengths = tuple(int(sum(cut)) for cut in pieces)
    return PackedChunks(
        sequences=PackedSequences(lengths, staged["cu_seqlens"], staged["seq_idx"]),
        chunk_lengths=tuple(int(length) for cut in pieces for length in cut),
        chunk_counts=tuple(len(cut) for cut in pieces),
        cu_chunk_seqlens=staged["cu_chunk_seqlens"],
        chunk_seq_idx=staged["chunk_seq_idx"],
        last_chunk_indices=staged["last_chunk_indices"],
        resumes=resumes,
    )


def stage_arrays(arrays: dict[str, np.ndarray], device: torch.device | str | None) -> dict[str, Tensor]:
    """Send integer arrays to the device in one copy; returns views of one buffer, in the same shapes.

    Arrays of int32 become views of int32, two elements in a number of the buffer; all others become views of int64.
    """
    packed = [_packed(array) for array in arrays.values()]
    parts = to_device(torch.from_numpy(np.concatenate(packed)), device).split([part.size for part in packed])
    return {name: _unpacked(part, array) for (name, array), part in zip(arrays.items(), parts, strict=True)}


def _packed(array: np.ndarray) -> np.ndarray:
    flat = array.reshape(-1)
    if flat.dtype == np.int32:
        return np.pad(flat, (0, flat.size % 2)).view(np.int64)
    return flat.astype(np.int64, copy=False)


def _unpacked(part: Tensor, array: np.ndarray) -> Tensor:
    own = part.view(torch.int32)[: array.size] if array.dtype == np.int32 else part
    return own.view(array.shape)


def starts(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return the first token of each piece, then the end of the last: [len(lengths)+1]."""
    return np.concatenate([[0], np.cumsum(lengths)])
