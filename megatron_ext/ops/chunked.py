"""What scans over chunks have in common: tokens spread over chunks of one length, and states that travel between them.

Letters: T tokens, S sequences, n chunks, C places in a chunk.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.ops.varlen import PackedChunks


def spread(t: Tensor, chunks: PackedChunks) -> Tensor:
    """[T, ...] -> [n, C, ...]; places behind a chunk's end repeat its last token."""
    if chunks.places is None:
        t = t[: chunks.sequences.num_tokens]
    else:
        t = t.index_select(0, chunks.places.tokens)
    return t.unflatten(0, (-1, chunks.longest))


def collect(y: Tensor, chunks: PackedChunks, num_rows: int) -> Tensor:
    """[n, C, ...] -> [num_rows, ...], zero behind the last sequence."""
    y = y.flatten(0, 1)
    if chunks.places is not None:
        y = y.index_select(0, chunks.places.place_of_token)
    missing = num_rows - y.shape[0]
    return F.pad(y, (0, 0) * (y.dim() - 1) + (0, missing)) if missing else y


def carry_states(
    added: Tensor, decay: Tensor, chunks: PackedChunks, initial_states: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Pass states from chunk to chunk, all sequences at once: state after = decay * state before + added.

    Args:
        added: [n, ...], what a chunk's own tokens leave at its end.
        decay: [n, ...], of a whole chunk, broadcast against the states.
        chunks: Which chunk follows which.
        initial_states: [S, ...], zeros if None.

    Returns:
        The states before and after each chunk, both [n, ...].
    """
    num_sequences = len(chunks.chunk_counts)
    if initial_states is None:
        initial_states = added.new_zeros(num_sequences, *added.shape[1:])
    carried = initial_states.to(added.dtype)
    if chunks.ranks is None:
        per_sequence = (num_sequences, -1)
        steps = zip(added.unflatten(0, per_sequence).unbind(1), decay.unflatten(0, per_sequence).unbind(1), strict=True)
        states = torch.stack(_carry(carried, steps), dim=1)  # [S, n/S + 1, ...]
        return states[:, :-1].flatten(0, 1), states[:, 1:].flatten(0, 1)
    order, sizes = chunks.ranks, chunks.ranks.sizes
    added, decay = (t.index_select(0, order.chunks).split(sizes) for t in (added, decay))
    states = torch.cat(_carry(carried.index_select(0, order.sequences), zip(added, decay, strict=True)))
    return states.index_select(0, order.before), states.index_select(0, order.after)


def _carry(state: Tensor, steps: Iterable[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """The states of all sequences [S, ...], then after each rank: of fewer and fewer sequences if some end early.

    `steps` are, rank by rank, what is added and how the state decays, for the sequences that have a chunk of that rank.
    """
    states = [state]
    for added, decay in steps:
        states.append(torch.addcmul(added, states[-1][: len(added)], decay))
    return states
