"""Mamba-1's recurrence in plain torch, on any device.

Per channel, with a decay for every state (Gu & Dao 2023, "Mamba: Linear-Time Sequence Modeling with Selective State
Spaces", section 3.2, algorithm 2; A discretized by zero-order hold, B by Euler's rule, as their code does):

    h_t = exp(delta_t * A) h_{t-1} + delta_t u_t B_t        [D, N]
    y_t = h_t C_t + skip u_t                                [D]

All states have different decays, so a chunk is not a matrix product as in Mamba-2. Chunks are cut into pieces of a few
tokens. The first tokens of all pieces are computed at once, from zero states, then all second tokens, and so on; states
are passed from piece to piece, and their contribution to the tokens of a piece is added. So no [T, D, N] is ever made,
and the number of tensor operations grows with the places in a piece plus the pieces of the longest sequence.

Letters: T tokens, D channels, N states of a channel, S sequences, R requests, n chunks, m pieces, C places in a piece.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_ext.ops.chunked import carry_states, collect, cut_into_pieces, pad_steps_to_chunks, pad_to_chunks
from megatron_ext.ops.recurrence import ScanOutput
from megatron_ext.ops.varlen import PackedChunks

LOG2_E = math.log2(math.e)


def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunks: PackedChunks,
    *,
    D: Tensor | None = None,
    initial_states: Tensor | None = None,
) -> ScanOutput:
    """Run the recurrence over packed sequences. Differentiable.

    Args:
        u: [T, D]; may have rows after the last sequence, which are not read.
        delta: [T, D] fp32, step sizes after softplus.
        A: [D, N] fp32, negative.
        B: [T, N].
        C: [T, N].
        chunks: Places of sequences and chunks on the token axis; results do not depend on the cuts.
        D: [D], or None for no direct path.
        initial_states: [S, D, N], zeros if None.

    Returns:
        y, and states of [D, N].

    All sums are accumulated in fp32 (fp64 if u is fp64; states are then fp64, too).
    """
    wide, pieces = torch.promote_types(u.dtype, torch.float32), chunks.prepared(cut_into_pieces)
    delta, A = pad_steps_to_chunks(delta.to(wide), pieces.packed).permute(2, 0, 1).contiguous(), A.to(wide) * LOG2_E
    placed_u, placed_B, placed_C = (_by_place(t.to(wide), pieces.packed) for t in (u, B, C))
    y, added = _scan_pieces(delta, delta * placed_u, A, placed_B, placed_C)
    elapsed = delta.cumsum(0)  # [C, m, D]
    before, after = carry_states(added, _decay(elapsed[-1], A), pieces.packed, initial_states)
    y = y + _read(before, elapsed, A, placed_C)
    if D is not None:
        y = torch.addcmul(y, placed_u, D.to(wide))
    y = collect(y.to(u.dtype).transpose(0, 1), pieces.packed, u.shape[0])
    chunk_states = after[pieces.last]
    return ScanOutput(y, chunk_states[chunks.last_chunk_indices], chunk_states)


def selective_scan_step(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor, *, D: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Run the recurrence over one token of each of R requests; inputs are as in `selective_scan`, with R in place of T.

    Args:
        state: [R, D, N] fp32, not modified.

    Returns:
        y [R, D] in u's dtype, and the new state [R, D, N] in state's dtype.
    """
    wide = torch.promote_types(u.dtype, torch.float32)
    delta, wide_u = delta.to(wide), u.to(wide)
    added = (delta * wide_u).unsqueeze(-1) * B.to(wide).unsqueeze(1)
    new_state = torch.addcmul(added, state.to(wide), _decay(delta, A.to(wide) * LOG2_E))
    y = _weigh(new_state, C.to(wide))
    if D is not None:
        y = torch.addcmul(y, wide_u, D.to(wide))
    return y.to(u.dtype), new_state.to(state.dtype)


def _by_place(t: Tensor, pieces: PackedChunks) -> Tensor:
    """Transpose [T, ...] to [C, m, ...]: tokens at the same place of all pieces are adjacent."""
    return pad_to_chunks(t, pieces).transpose(0, 1).contiguous()


def _decay(elapsed: Tensor, A: Tensor) -> Tensor:
    """Return 2**(elapsed * A): [m, D] and [D, N] -> [m, D, N]. On CPUs exp2 takes half the time of exp."""
    return (elapsed.unsqueeze(-1) * A).exp2_()


def _scan_pieces(delta: Tensor, stepped_u: Tensor, A: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, Tensor]:
    """Run every piece from a zero state: y [C, m, D], and the states [m, D, N] at the ends of the pieces.

    `delta` and `stepped_u` = delta * u are [C, m, D], `B` and `C` [C, m, N].
    """
    state: Tensor | None = None
    outputs = []
    for step, x, b, c in zip(delta, stepped_u, B, C, strict=True):
        added = x.unsqueeze(-1) * b.unsqueeze(1)
        state = added if state is None else torch.addcmul(added, state, _decay(step, A))
        outputs.append(_weigh(state, c))
    assert state is not None, "a piece has at least one token"
    return torch.stack(outputs), state


def _read(before: Tensor, elapsed: Tensor, A: Tensor, C: Tensor) -> Tensor:
    """Return the contribution to each token's output of the state that its piece starts with: [C, m, D].

    Args:
        before: State at the start of each of the m pieces, [m, D, N].
        elapsed: Step sizes summed from the start of the piece to each token, [C, m, D].
        A: Decay rates times log2(e), [D, N].
        C: Output projection of each token, [C, m, N].
    """
    return torch.stack([_weigh(_decay(time, A) * before, c) for time, c in zip(elapsed, C, strict=True)])


def _weigh(states: Tensor, C: Tensor) -> Tensor:
    """Return states [m, D, N] times C [m, N]: [m, D]. On CPUs, C as a row is several times as fast as C as a column."""
    return torch.bmm(C.unsqueeze(1), states.transpose(1, 2)).squeeze(1)
