"""Where sequences, and the kernel chunks they are cut into, lie on the packed token axis of one step.

Everything is computed on the host with numpy and reaches the device in a single copy; nothing is read back.
T tokens of the packed step, S sequences, n chunks, C places in a padded chunk.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

PIECE = 32
"""Tokens of a piece of a chunk, for operators that cut chunks further."""


@dataclass(frozen=True)
class PackedSequences:
    """S sequences one behind the other on the token axis.

    Attributes:
        lengths: Tokens of each sequence, on the host, each at least 1.
        cu_seqlens: [S+1] int64, first token of each sequence, then T.
        seq_idx: [T] int64, the sequence that each token belongs to.
    """

    lengths: tuple[int, ...]
    cu_seqlens: Tensor
    seq_idx: Tensor

    @property
    def num_tokens(self) -> int:
        """T, without the padding that may follow on the token axis."""
        return self.seq_idx.numel()


@dataclass(frozen=True)
class PaddedPlaces:
    """How the tokens of uneven chunks are spread over [n, C] places, C being the longest chunk.

    Attributes:
        tokens: [n*C] int64, the token at each place; places behind a chunk's end name the chunk's last token again, so
            that gathering never meets a value from outside the chunk. Whoever gathers gives those places no weight.
        is_padding: [n, C] bool, True at places behind a chunk's end.
        place_of_token: [T] int64, the inverse: index into the flattened places.
    """

    tokens: Tensor
    is_padding: Tensor
    place_of_token: Tensor


@dataclass(frozen=True)
class RankOrder:
    """The order in which states travel from chunk to chunk: first chunks of all sequences, second chunks, and so on.

    Sequences with more chunks come first, so the ones that still have a chunk of rank r are a prefix of those that
    had one of rank r-1. *Carried* states are stacked as [initial states in this order, states after each chunk in this
    order]: S + n of them.

    Attributes:
        sizes: Sequences that have a chunk of rank 0, 1, ..., on the host; sums to n.
        sequences: [S] int64, the sequences by falling number of chunks.
        chunks: [n] int64, the chunks in this order.
        before: [n] int64, for each chunk (in token order) the carried state before it.
        after: [n] int64, for each chunk (in token order) the carried state after it.
    """

    sizes: tuple[int, ...]
    sequences: Tensor
    chunks: Tensor
    before: Tensor
    after: Tensor


@dataclass(frozen=True)
class PackedChunks:
    """Sequences cut into kernel chunks; no chunk holds tokens of two sequences.

    Attributes:
        sequences: What was cut.
        chunk_lengths: Tokens of each chunk, on the host, in token order.
        chunk_counts: Chunks of each sequence, on the host.
        cu_chunk_seqlens: [n+1] int64, first token of each chunk, then T.
        chunk_seq_idx: [n] int64, the sequence of each chunk.
        last_chunk_indices: [S] int64, the last chunk of each sequence.
        places: How to pad the chunks to one length; None if they all have it already.
        ranks: How states travel between chunks; None if all sequences have equally many, so that [S, n/S] says it.
    """

    sequences: PackedSequences
    chunk_lengths: tuple[int, ...]
    chunk_counts: tuple[int, ...]
    cu_chunk_seqlens: Tensor
    chunk_seq_idx: Tensor
    last_chunk_indices: Tensor
    places: PaddedPlaces | None
    ranks: RankOrder | None

    @property
    def longest(self) -> int:
        """C, tokens of the longest chunk there is (which may be less than the chunk size it was cut with)."""
        return max(self.chunk_lengths)

    @functools.cached_property
    def pieces(self) -> Pieces:
        """The chunks cut further; computed when it is first asked for, so once per step."""
        cuts = [_cut_evenly(length, PIECE) for length in self.chunk_lengths]
        device, last = self.cu_chunk_seqlens.device, np.cumsum([len(cut) for cut in cuts]) - 1
        remaining = iter(cuts)
        of_sequences = [[p for cut in itertools.islice(remaining, n) for p in cut] for n in self.chunk_counts]
        return Pieces(pack_chunks(of_sequences, device), _stage({"last": last}, device)["last"])


@dataclass(frozen=True)
class Pieces:
    """Chunks cut further into pieces of at most PIECE tokens.

    Attributes:
        packed: The pieces, in the place of the chunks.
        last: [n] int64, the last piece of each chunk.
    """

    packed: PackedChunks
    last: Tensor


def _cut_evenly(length: int, longest: int) -> list[int]:
    whole, rest = divmod(length, longest)
    return [longest] * whole + ([rest] if rest else [])


def pack_sequences(lengths: Sequence[int], device: torch.device | str | None) -> PackedSequences:
    """Lay sequences of these lengths (tokens, at least one sequence, each at least 1) one behind the other."""
    lengths = tuple(int(length) for length in lengths)
    return _sequences(lengths, _stage(_sequence_arrays(lengths), device))


def pack_chunks(pieces: Sequence[Sequence[int]], device: torch.device | str | None) -> PackedChunks:
    """Lay out sequences that are cut already: pieces[i] are the lengths (tokens, at least 1) of sequence i's chunks."""
    counts = tuple(len(cut) for cut in pieces)
    chunk_lengths = tuple(int(length) for cut in pieces for length in cut)
    assert min(chunk_lengths) >= 1, "every chunk holds a token"
    lengths = tuple(sum(int(length) for length in cut) for cut in pieces)
    is_even = min(chunk_lengths) == max(chunk_lengths)
    is_grid = min(counts) == max(counts)
    arrays = _sequence_arrays(lengths) | {
        "cu_chunk_seqlens": _starts(chunk_lengths),
        "chunk_seq_idx": np.repeat(np.arange(len(counts)), counts),
        "last_chunk_indices": np.cumsum(counts) - 1,
    }
    if not is_even:
        arrays |= _place_arrays(np.asarray(chunk_lengths))
    if not is_grid:
        arrays |= _rank_arrays(np.asarray(counts))
    staged = _stage(arrays, device)
    return PackedChunks(
        sequences=_sequences(lengths, staged),
        chunk_lengths=chunk_lengths,
        chunk_counts=counts,
        cu_chunk_seqlens=staged["cu_chunk_seqlens"],
        chunk_seq_idx=staged["chunk_seq_idx"],
        last_chunk_indices=staged["last_chunk_indices"],
        places=None if is_even else _places(staged),
        ranks=None if is_grid else _ranks(counts, staged),
    )


def _stage(arrays: dict[str, np.ndarray], device: torch.device | str | None) -> dict[str, Tensor]:
    """Send integer arrays to the device in one copy; the answers are int64 views of one buffer, in the same shapes."""
    buffer = np.concatenate([array.reshape(-1).astype(np.int64, copy=False) for array in arrays.values()])
    parts = torch.from_numpy(buffer).to(device).split([array.size for array in arrays.values()])
    return {name: part.view(array.shape) for (name, array), part in zip(arrays.items(), parts, strict=True)}


def _starts(lengths: Sequence[int]) -> np.ndarray:
    """First token of each piece, then the end of the last: [len(lengths)+1]."""
    return np.concatenate([[0], np.cumsum(lengths)])


def _sequence_arrays(lengths: tuple[int, ...]) -> dict[str, np.ndarray]:
    assert min(lengths) >= 1, "every sequence holds a token"
    return {"cu_seqlens": _starts(lengths), "seq_idx": np.repeat(np.arange(len(lengths)), lengths)}


def _sequences(lengths: tuple[int, ...], staged: dict[str, Tensor]) -> PackedSequences:
    return PackedSequences(lengths, staged["cu_seqlens"], staged["seq_idx"])


def _place_arrays(chunk_lengths: np.ndarray) -> dict[str, np.ndarray]:
    """The arrays of PaddedPlaces."""
    offsets = np.arange(chunk_lengths.max())
    is_padding = offsets >= chunk_lengths[:, None]  # [n, C]
    first = _starts(chunk_lengths)[:-1, None]
    return {
        "tokens": (first + np.minimum(offsets, chunk_lengths[:, None] - 1)).reshape(-1),
        "is_padding": is_padding,
        "place_of_token": np.flatnonzero(~is_padding),
    }


def _places(staged: dict[str, Tensor]) -> PaddedPlaces:
    return PaddedPlaces(staged["tokens"], staged["is_padding"].bool(), staged["place_of_token"])


def _rank_arrays(counts: np.ndarray) -> dict[str, np.ndarray]:
    """The arrays of RankOrder."""
    num_sequences, num_chunks = len(counts), int(counts.sum())
    sequences = np.argsort(-counts, kind="stable")
    rank = np.arange(num_chunks) - np.repeat(np.cumsum(counts) - counts, counts)  # [n] rank within its sequence
    standing = np.empty(num_sequences, dtype=np.int64)  # where a sequence stands in `sequences`
    standing[sequences] = np.arange(num_sequences)
    standing = np.repeat(standing, counts)  # [n]
    first_of_rank = _starts(rank_sizes(counts))
    after = num_sequences + first_of_rank[rank] + standing
    before = np.where(rank == 0, standing, num_sequences + first_of_rank[rank - 1] + standing)
    return {"sequences": sequences, "chunks": np.argsort(after), "before": before, "after": after}


def rank_sizes(counts: Sequence[int]) -> tuple[int, ...]:
    """How many sequences have a chunk of rank 0, 1, ... if sequence i has counts[i] chunks."""
    counts = np.asarray(counts)
    return tuple(int((counts > rank).sum()) for rank in range(int(counts.max())))


def _ranks(counts: tuple[int, ...], staged: dict[str, Tensor]) -> RankOrder:
    return RankOrder(rank_sizes(counts), staged["sequences"], staged["chunks"], staged["before"], staged["after"])
