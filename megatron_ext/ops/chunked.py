"""Chunked scans of the references: layout of chunks, decay within a chunk, states passed between chunks.

The layout (padded places, the order of states, smaller pieces) is computed once a step from the metadata in `varlen`
(see `StepMetadata.prepared`); other backends do not use it.

The metadata of a step usually has the shapes of its prompts. With static shapes (`static_chunks`) they follow from
upper bounds: S sequences of m chunks with C places each, filled as far as there are tokens. Surplus chunks are empty:
places without a token neither decay nor add anything, so a state passes them unchanged. The contents of the tensors may
change; nothing on the host depends on them.

Letters: T tokens of the packed step, S sequences, n chunks, C places in a padded chunk (c: the receiving place, s: the
sending place).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx

from megatron_ext.ops.varlen import PackedChunks, PackedSequences, Resumes, pack_chunks, stage_arrays, starts

PIECE = 32
"""Tokens of a piece of a chunk, for scans that cut chunks further."""


@dataclass(frozen=True)
class PaddedPlaces:
    """Places of uneven chunks' tokens in a padded [n, C] layout, C being the longest chunk.

    Attributes:
        tokens: [n*C] int64, the token at each place; places after a chunk's end repeat the chunk's last token, so that
            gathering never reads a value from outside the chunk. Callers give those places no weight.
        is_padding: [n, C] bool, True at places after a chunk's end.
        place_of_token: [T] int64, the inverse: index into the flattened places.
    """

    tokens: Tensor
    is_padding: Tensor
    place_of_token: Tensor


@dataclass(frozen=True)
class RankOrder:
    """Order in which states pass from chunk to chunk: first chunks of all sequences, second chunks, and so on.

    Sequences are ordered by falling number of chunks, so the first `sizes[r]` sequences have a chunk of rank r.
    *Carried* states are the S initial states in this order, followed by the n states after each chunk in this order.

    Attributes:
        sizes: Number of sequences with a chunk of rank 0, 1, ..., on the host; sums to n.
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
class PaddedChunks:
    """Chunks as the rows of padded tensors.

    Attributes:
        longest: C, tokens of the longest chunk (which may be less than the chunk size used for cutting).
        places: Padding of the chunks to one length; None if they all have equal lengths.
        ranks: Order of states between chunks; None if all sequences have equally many chunks, a [S, n/S] grid.
    """

    longest: int
    places: PaddedPlaces | None
    ranks: RankOrder | None


def pad_chunks(chunks: PackedChunks) -> PaddedChunks:
    """Lay chunks out as padded rows; call through `chunks.prepared(pad_chunks)`."""
    lengths, counts = chunks.chunk_lengths, chunks.chunk_counts
    longest = max(lengths)
    is_even, is_grid = min(lengths) == longest, min(counts) == max(counts)
    arrays = {} if is_even else _place_arrays(np.asarray(lengths))
    if not is_grid:
        arrays |= _rank_arrays(np.asarray(counts))
    staged = stage_arrays(arrays, chunks.cu_chunk_seqlens.device) if arrays else {}
    places, ranks = None, None
    if not is_even:
        places = PaddedPlaces(staged["tokens"], staged["is_padding"].bool(), staged["place_of_token"])
    if not is_grid:
        order = (staged[name] for name in ("sequences", "chunks", "before", "after"))
        ranks = RankOrder(rank_sizes(counts), *order)
    return PaddedChunks(longest, places, ranks)


@dataclass(frozen=True)
class Pieces:
    """Chunks cut further into pieces of at most PIECE tokens.

    Attributes:
        packed: The pieces, as packed chunks.
        last: [n] int64, the last piece of each chunk.
    """

    packed: PackedChunks
    last: Tensor


def cut_into_pieces(chunks: PackedChunks) -> Pieces:
    """Cut chunks further; call through `chunks.prepared(cut_into_pieces)`."""
    cuts = [cut_evenly(length, PIECE) for length in chunks.chunk_lengths]
    device, last = chunks.cu_chunk_seqlens.device, np.cumsum([len(cut) for cut in cuts]) - 1
    remaining = iter(cuts)
    of_sequences = [[p for cut in itertools.islice(remaining, n) for p in cut] for n in chunks.chunk_counts]
    return Pieces(pack_chunks(of_sequences, device), stage_arrays({"last": last}, device)["last"])


def cut_evenly(length: int, longest: int) -> list[int]:
    """Return the lengths of pieces of `length` tokens, `longest` tokens each but for the last."""
    whole, rest = divmod(length, longest)
    return [longest] * whole + ([rest] if rest else [])


def _place_arrays(chunk_lengths: np.ndarray) -> dict[str, np.ndarray]:
    offsets = np.arange(chunk_lengths.max())
    is_padding = offsets >= chunk_lengths[:, None]  # [n, C]
    first = starts(chunk_lengths)[:-1, None]
    return {
        "tokens": (first + np.minimum(offsets, chunk_lengths[:, None] - 1)).reshape(-1),
        "is_padding": is_padding,
        "place_of_token": np.flatnonzero(~is_padding),
    }


def _rank_arrays(counts: np.ndarray) -> dict[str, np.ndarray]:
    num_sequences, num_chunks = len(counts), int(counts.sum())
    sequences = np.argsort(-counts, kind="stable")
    rank = np.arange(num_chunks) - np.repeat(np.cumsum(counts) - counts, counts)  # [n] rank within its sequence
    standing = np.empty(num_sequences, dtype=np.int64)  # position of a sequence in `sequences`
    standing[sequences] = np.arange(num_sequences)
    standing = np.repeat(standing, counts)  # [n]
    first_of_rank = starts(rank_sizes(counts))
    after = num_sequences + first_of_rank[rank] + standing
    before = np.where(rank == 0, standing, num_sequences + first_of_rank[rank - 1] + standing)
    return {"sequences": sequences, "chunks": np.argsort(after), "before": before, "after": after}


def rank_sizes(counts: Sequence[int] | np.ndarray) -> tuple[int, ...]:
    """Return how many sequences have a first, a second, ... chunk if sequence i has counts[i] chunks."""
    found = np.asarray(counts)
    return tuple(int((found > rank).sum()) for rank in range(int(found.max())))


@dataclass(frozen=True)
class ChunkGrid:
    """Grid of S sequences of m chunks with C places, over T tokens."""

    sequences: int
    chunks: int
    places: int
    tokens: int

    @property
    def count(self) -> int:
        """Number of chunks of all sequences, n."""
        return self.sequences * self.chunks


def static_chunks(
    grid: ChunkGrid,
    cu_seqlens: Tensor,
    seq_idx: Tensor,
    cu_chunk_seqlens: Tensor,
    places: PaddedPlaces,
    resumes: Resumes | None = None,
) -> PackedChunks:
    """Return prefill metadata over static tensors, which the caller refills for each step.

    Args:
        grid: Sizes of the tensors.
        cu_seqlens: [S+1] int64, first token of each sequence, and the end of the last one.
        seq_idx: [T] int64, the sequence of each token; arbitrary after the last sequence.
        cu_chunk_seqlens: [n+1] int64, first token of each chunk; an empty chunk begins at the start of the next one.
        places: Any token of the same sequence at places without one; arbitrary places after the last sequence.
        resumes: See `PackedChunks`.
    """
    device, count = cu_seqlens.device, grid.count
    sequences = PackedSequences((grid.tokens,) * grid.sequences, cu_seqlens, seq_idx, has_static_shapes=True)
    numbers = torch.arange(count, device=device)
    chunks = PackedChunks(
        sequences=sequences,
        chunk_lengths=(grid.places,) * count,
        chunk_counts=(grid.chunks,) * grid.sequences,
        cu_chunk_seqlens=cu_chunk_seqlens,
        chunk_seq_idx=torch.div(numbers, grid.chunks, rounding_mode="floor"),
        last_chunk_indices=numbers[grid.chunks - 1 :: grid.chunks],
        resumes=resumes,
    )
    chunks.provide(pad_chunks, _padding(grid.places, places))
    width = PIECE if grid.places % PIECE == 0 else grid.places
    pieces = _pieces(chunks, grid, width)
    pieces.packed.provide(pad_chunks, _padding(width, places))
    chunks.provide(cut_into_pieces, pieces)
    return chunks


def _padding(width: int, places: PaddedPlaces) -> PaddedChunks:
    return PaddedChunks(width, replace(places, is_padding=places.is_padding.view(-1, width)), None)


def _pieces(chunks: PackedChunks, grid: ChunkGrid, width: int) -> Pieces:
    """Return the same places as pieces of `width`; only counts and places of pieces are used, not their starts."""
    each = grid.places // width
    numbers = torch.arange(grid.count * each, device=chunks.cu_chunk_seqlens.device)
    packed = PackedChunks(
        sequences=chunks.sequences,
        chunk_lengths=(width,) * (grid.count * each),
        chunk_counts=(grid.chunks * each,) * grid.sequences,
        cu_chunk_seqlens=numbers,
        chunk_seq_idx=torch.div(numbers, grid.chunks * each, rounding_mode="floor"),
        last_chunk_indices=numbers[grid.chunks * each - 1 :: grid.chunks * each],
    )
    return Pieces(packed, numbers[each - 1 :: each])


LEAST_LOG_DECAY = -60.0
"""Lower bound of the log of the decay between two tokens of a chunk. e**-60 is negligible in fp32 and fp64 next to a
token's own weight of 1, and far from denormal numbers, which make exp and matrix products several times slower."""


def pad_to_chunks(t: Tensor, chunks: PackedChunks) -> Tensor:
    """Lay tokens out in chunks: [T, ...] -> [n, C, ...]; places after a chunk's end repeat its last token."""
    laid = chunks.prepared(pad_chunks)
    if laid.places is None:
        t = t[: chunks.sequences.num_tokens]
    else:
        t = t.index_select(0, laid.places.tokens)
    return t.unflatten(0, (-1, laid.longest))


def pad_steps_to_chunks(steps: Tensor, chunks: PackedChunks) -> Tensor:
    """Lay steps out in chunks: [T, H] -> [n, H, C]; zero after a chunk's end, where nothing may decay or be added."""
    steps, places = pad_to_chunks(steps, chunks), _places(chunks)
    if places is not None:
        steps = steps.masked_fill(places.is_padding.unsqueeze(-1), 0.0)
    return steps.transpose(1, 2).contiguous()


def collect(y: Tensor, chunks: PackedChunks, num_rows: int) -> Tensor:
    """Return tokens from their chunks: [n, C, ...] -> [num_rows, ...], zero after the last sequence."""
    y, places = y.flatten(0, 1), _places(chunks)
    if places is not None:
        y = y.index_select(0, places.place_of_token)
    missing = num_rows - y.shape[0]
    return F.pad(y, (0, 0) * (y.dim() - 1) + (0, missing)) if missing else y


def carry_states(
    added: Tensor, decay: Tensor, chunks: PackedChunks, initial_states: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Pass states from chunk to chunk, all sequences at once: state after = decay * state before + added.

    Args:
        added: [n, ...], contribution of a chunk's own tokens to the state at its end.
        decay: [n, ...], decay over a whole chunk, broadcast against the states.
        chunks: Defines the order of the chunks.
        initial_states: [S, ...], zeros if None.

    Returns:
        The states before and after each chunk, both [n, ...].
    """
    if initial_states is None:
        initial_states = added.new_zeros(len(chunks.chunk_counts), *added.shape[1:])

    def advance(state: Tensor, added: Tensor, decay: Tensor) -> Tensor:
        return torch.addcmul(added, state, decay)

    return pass_states(advance, (added, decay), chunks, initial_states)


def pass_states(
    advance: Callable[..., Tensor], inputs: Sequence[Tensor], chunks: PackedChunks, initial_states: Tensor
) -> tuple[Tensor, Tensor]:
    """Pass states from chunk to chunk, all sequences at once, by any rule.

    Args:
        advance: Maps states and the rows of `inputs` of one chunk each to the states after those chunks. Called rank by
            rank, see `RankOrder`, for fewer and fewer sequences if some end early.
        inputs: [n, ...] each, one row a chunk.
        chunks: Defines the order of the chunks.
        initial_states: [S, ...].

    Returns:
        The states before and after each chunk, both [n, ...], in the type of the inputs.
    """
    initial_states, ranks = initial_states.to(inputs[0].dtype), _ranks(chunks)
    states = [initial_states if ranks is None else initial_states.index_select(0, ranks.sequences)]
    for rows in zip(*(_by_rank(t, chunks) for t in inputs), strict=True):
        states.append(advance(states[-1][: len(rows[0])], *rows))
    if ranks is None:
        stacked = torch.stack(states, dim=1)  # [S, n/S + 1, ...]
        return stacked[:, :-1].flatten(0, 1), stacked[:, 1:].flatten(0, 1)
    joined = torch.cat(states)
    return joined.index_select(0, ranks.before), joined.index_select(0, ranks.after)


def _by_rank(t: Tensor, chunks: PackedChunks) -> Sequence[Tensor]:
    """Split [n, ...] into the first chunks of all sequences, the second ones, and so on."""
    ranks = _ranks(chunks)
    if ranks is None:
        return t.unflatten(0, (len(chunks.chunk_counts), -1)).unbind(1)
    return t.index_select(0, ranks.chunks).split(ranks.sizes)


def in_token_order(by_rank: Sequence[Tensor], chunks: PackedChunks) -> Tensor:
    """Return values that `advance` produced rank by rank in token order, [n, ...]."""
    ranks = _ranks(chunks)
    if ranks is None:
        return torch.stack(tuple(by_rank), dim=1).flatten(0, 1)
    return torch.cat(tuple(by_rank)).index_select(0, ranks.after - len(chunks.chunk_counts))


def _places(chunks: PackedChunks) -> PaddedPlaces | None:
    return chunks.prepared(pad_chunks).places


def _ranks(chunks: PackedChunks) -> RankOrder | None:
    return chunks.prepared(pad_chunks).ranks


def decay_between(log_decay: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the decay from place s to place c of a chunk: [..., c, s] in `dtype`.

    The decay is 1 where c comes before s; the caller masks those places.

    Args:
        log_decay: [..., C] fp64, logarithm of the decay from the chunk's start to the end of each place. Needs fp64
            since sums over a chunk of fast decay may reach thousands, and their differences must be accurate to 1e-5.
        dtype: Type of the result.
    """
    return _DecayBetween.apply(log_decay, dtype)


class _DecayBetween(torch.autograd.Function):
    """Autograd function of `decay_between`.

    The fp64 logarithms are split in two numbers of `dtype`, so that their differences are exact without an fp64 [c, s].
    Autograd alone would keep one more [c, s] and pass over it five more times.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, log_decay: Tensor, dtype: torch.dtype) -> Tensor:
        high = log_decay.to(dtype)
        low = (log_decay - high).to(dtype)
        gap = high.unsqueeze(-1) - high.unsqueeze(-2)
        gap.add_(low.unsqueeze(-1)).sub_(low.unsqueeze(-2))
        decay = gap.clamp_(LEAST_LOG_DECAY, 0.0).exp_()
        ctx.save_for_backward(decay)
        return decay

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        (decay,) = ctx.saved_tensors  # type: ignore[attr-defined]  # set by torch, and not in its stubs
        grad_gap = grad * decay  # zero where the caller masked
        return (grad_gap.sum(-1) - grad_gap.sum(-2)).double(), None
