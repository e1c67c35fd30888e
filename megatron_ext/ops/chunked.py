"""Shared parts of chunked scans: tokens laid out in chunks, decay within a chunk, states passed between chunks.

Letters: T tokens, n chunks, C places in a chunk (c: the receiving place, s: the sending place), S sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx

from megatron_ext.ops.chunk_padding import PaddedPlaces, RankOrder, pad_chunks
from megatron_ext.ops.varlen import PackedChunks

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
