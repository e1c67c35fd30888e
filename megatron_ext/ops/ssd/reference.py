"""Mamba-2's recurrence in plain torch, on any device.

Per head, with scalar decay (Dao & Gu 2024, "Transformers are SSMs", section 6 and listing 1):

    h_t = exp(dt_t * A) h_{t-1} + dt_t x_t B_t^T        [P, N]
    y_t = h_t C_t + D x_t                               [P]

Letters: T tokens, H heads, G groups of heads that share B and C, P head dimension, N state size, S sequences, n chunks,
C places in a chunk (`c` and `s` below: place that receives, place that sends), J = H / G heads of a group.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.ops.varlen import PackedChunks


class SsdOutput(NamedTuple):
    """What a scan gives.

    Attributes:
        y: [T, H, P] in x's dtype; zero at rows behind the last sequence.
        final_states: [S, H, P, N] fp32, after the last token of each sequence.
        chunk_states: [n, H, P, N] fp32, after the last token of each chunk.
    """

    y: Tensor
    final_states: Tensor
    chunk_states: Tensor


def ssd_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunks: PackedChunks,
    *,
    D: Tensor | None = None,
    initial_states: Tensor | None = None,
) -> SsdOutput:
    """Run the recurrence over packed sequences, quadratic within chunks and linear between them. Differentiable.

    Args:
        x: [T, H, P]; may have rows behind the last sequence, which are not read.
        dt: [T, H] fp32, step sizes after softplus.
        A: [H] fp32, negative.
        B, C: [T, G, N].
        chunks: Where sequences and chunks lie on the token axis; results do not depend on where the cuts are.
        D: [H] or None.
        initial_states: [S, H, P, N], zeros if None.

    All sums are accumulated in fp32 (fp64 if x is fp64, and then the states are, too).
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    chunked_x = _spread(x, chunks).to(wide)  # [n, C, H, P]
    chunked_dt = _spread_steps(dt, chunks).to(wide)  # [n, H, C]
    chunked_B, chunked_C = (_spread(t, chunks).to(wide).transpose(1, 2).contiguous() for t in (B, C))  # [n, G, C, N]

    log_decay = torch.cumsum(chunked_dt * A.to(wide)[:, None], dim=-1)  # [n, H, C] from the chunk's start
    stepped_x = chunked_x * chunked_dt.transpose(1, 2).unsqueeze(-1)  # [n, C, H, P]
    added = _states_added(stepped_x, chunked_B, log_decay)
    before, after = _carry_states(added, log_decay[..., -1].exp(), chunks, initial_states)
    y = _within_chunks(stepped_x, chunked_B, chunked_C, log_decay) + _from_before(before, chunked_C, log_decay)
    if D is not None:
        y = y + chunked_x * D.to(wide)[:, None]
    return SsdOutput(_collect(y.to(x.dtype), chunks, x.shape[0]), after[chunks.last_chunk_indices], after)


def ssd_step(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor, *, D: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Run the recurrence over one token of each of R requests.

    Args:
        x: [R, H, P]. dt: [R, H] after softplus. A: [H] negative. B, C: [R, G, N]. D: [H] or None.
        state: [R, H, P, N] fp32, not modified.

    Returns:
        y [R, H, P] in x's dtype, and the new state [R, H, P, N] in state's dtype.
    """
    rows, heads, head_dim = x.shape
    groups, state_size = B.shape[1:]
    wide = torch.promote_types(x.dtype, torch.float32)
    decay = (dt * A).to(wide).exp()  # [R, H]
    stepped_x = (x * dt.unsqueeze(-1)).to(wide).view(rows, groups, -1, 1)  # [R, G, J*P, 1]
    decayed = (state.to(wide) * decay[..., None, None]).view(rows, groups, -1, state_size)  # [R, G, J*P, N]
    new_state = torch.addcmul(decayed, stepped_x, B.to(wide).unsqueeze(2))
    y = (new_state @ C.to(wide).unsqueeze(-1)).view(rows, heads, head_dim)
    if D is not None:
        y = y + x * D[:, None]
    return y.to(x.dtype), new_state.view(state.shape).to(state.dtype)


def _spread(t: Tensor, chunks: PackedChunks) -> Tensor:
    """[T, ...] -> [n, C, ...]; places behind a chunk's end repeat its last token."""
    if chunks.places is None:
        t = t[: chunks.sequences.num_tokens]
    else:
        t = t.index_select(0, chunks.places.tokens)
    return t.unflatten(0, (-1, chunks.longest))


def _spread_steps(dt: Tensor, chunks: PackedChunks) -> Tensor:
    """[T, H] -> [n, H, C]; zero behind a chunk's end, so that those places neither decay nor add anything."""
    dt = _spread(dt, chunks)
    if chunks.places is not None:
        dt = dt.masked_fill(chunks.places.is_padding.unsqueeze(-1), 0.0)
    return dt.transpose(1, 2).contiguous()


def _collect(y: Tensor, chunks: PackedChunks, num_rows: int) -> Tensor:
    """[n, C, H, P] -> [num_rows, H, P], zero behind the last sequence."""
    y = y.flatten(0, 1)
    if chunks.places is not None:
        y = y.index_select(0, chunks.places.place_of_token)
    missing = num_rows - y.shape[0]
    return F.pad(y, (0, 0, 0, 0, 0, missing)) if missing else y


def _states_added(stepped_x: Tensor, B: Tensor, log_decay: Tensor) -> Tensor:
    """What a chunk's own tokens add to the state at its end (listing 1, step 2): [n, H, P, N].

    Args:
        stepped_x: [n, C, H, P], dt * x. B: [n, G, C, N]. log_decay: [n, H, C], cumulative.
    """
    num_chunks, places, heads, head_dim = stepped_x.shape
    groups, state_size = B.shape[1], B.shape[-1]
    to_end = (log_decay[..., -1:] - log_decay).exp()  # [n, H, C], at most 1
    weighted = (stepped_x * to_end.transpose(1, 2).unsqueeze(-1)).view(num_chunks, places, groups, -1)
    added = weighted.permute(0, 2, 3, 1) @ B  # [n, G, J*P, C] @ [n, G, C, N]
    return added.view(num_chunks, heads, head_dim, state_size)


def _carry_states(
    added: Tensor, decay: Tensor, chunks: PackedChunks, initial_states: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Pass states from chunk to chunk (listing 1, step 3), all sequences at once.

    Args:
        added: [n, H, P, N]. decay: [n, H], of a whole chunk. initial_states: [S, H, P, N] or None.

    Returns:
        The states before and after each chunk, both [n, H, P, N].
    """
    num_sequences = len(chunks.chunk_counts)
    if initial_states is None:
        initial_states = added.new_zeros(num_sequences, *added.shape[1:])
    carried = initial_states.to(added.dtype)
    ranks = chunks.ranks
    if ranks is None:
        sizes = (1,) * len(chunks.chunk_lengths)
    else:
        sizes = ranks.sizes
        carried, added, decay = carried[ranks.sequences], added[ranks.chunks], decay[ranks.chunks]
    stack = [carried]
    for own, kept in zip(added.split(sizes), decay[..., None, None].split(sizes), strict=True):
        stack.append(torch.addcmul(own, stack[-1][: len(own)], kept))
    states = torch.cat(stack)
    return (states[:-1], states[1:]) if ranks is None else (states[ranks.before], states[ranks.after])


def _within_chunks(stepped_x: Tensor, B: Tensor, C: Tensor, log_decay: Tensor) -> Tensor:
    """What tokens of the same chunk give each token (listing 1, step 1): [n, C, H, P]."""
    groups, places = B.shape[1], B.shape[2]
    is_later = torch.ones(places, places, dtype=torch.bool, device=B.device).triu(1)
    gap = log_decay.unsqueeze(-1) - log_decay.unsqueeze(-2)  # [n, H, c, s]
    # Masked before exp: towards later tokens the sums are positive and may overflow, and inf * 0 is NaN.
    decay = gap.masked_fill_(is_later, float("-inf")).exp_()
    scores = C @ B.transpose(-1, -2)  # [n, G, c, s]
    weights = (decay.unflatten(1, (groups, -1)) * scores.unsqueeze(2)).flatten(1, 2)  # [n, H, c, s]
    return (weights @ stepped_x.transpose(1, 2)).transpose(1, 2)


def _from_before(before: Tensor, C: Tensor, log_decay: Tensor) -> Tensor:
    """What the state before the chunk gives each token (listing 1, step 4): [n, C, H, P]."""
    num_chunks, heads, head_dim, state_size = before.shape
    groups, places = C.shape[1], C.shape[2]
    read = C @ before.reshape(num_chunks, groups, -1, state_size).transpose(-1, -2)  # [n, G, C, J*P]
    read = read.transpose(1, 2).reshape(num_chunks, places, heads, head_dim)
    return read * log_decay.exp().transpose(1, 2).unsqueeze(-1)
