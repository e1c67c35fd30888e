"""Mamba-2's recurrence in plain torch, on any device.

Per head, with scalar decay (Dao & Gu 2024, "Transformers are SSMs", section 6 and listing 1):

    h_t = exp(dt_t * A) h_{t-1} + dt_t x_t B_t^T        [P, N]
    y_t = h_t C_t + D x_t                               [P]

Letters: T tokens, H heads, G groups of heads that share B and C, J = H / G heads of a group, P head dimension, N state
size, S sequences, R requests, n chunks, C places in a chunk (c: the receiving place, s: the sending place).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ext.ops.chunked import carry_states, collect, decay_between, pad_steps_to_chunks, pad_to_chunks
from megatron_ext.ops.recurrence import ScanOutput
from megatron_ext.ops.varlen import PackedChunks


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
) -> ScanOutput:
    """Run the recurrence over packed sequences, quadratic within chunks and linear between them. Differentiable.

    Args:
        x: [T, H, P]; may have rows after the last sequence, which are not read.
        dt: [T, H] fp32, step sizes after softplus.
        A: [H] fp32, negative.
        B: [T, G, N].
        C: [T, G, N].
        chunks: Places of sequences and chunks on the token axis; results do not depend on the cuts.
        D: [H], or None for no direct path.
        initial_states: [S, H, P, N], zeros if None.

    Returns:
        y, and states of [H, P, N].

    All sums are accumulated in fp32 (fp64 if x is fp64; states are then fp64, too).
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    groups, (heads, head_dim) = B.shape[1], x.shape[1:]
    chunked_B, chunked_C = (
        pad_to_chunks(t, chunks).to(wide).transpose(1, 2).contiguous() for t in (B, C)
    )  # [n, G, C, N]
    chunked_x = pad_to_chunks(x, chunks).to(wide).unflatten(2, (groups, -1))  # [n, C, G, J, P]
    chunked_dt = pad_steps_to_chunks(dt, chunks)  # [n, H, C]
    log_decay = _log_decay(chunked_dt, A).unflatten(1, (groups, -1))  # [n, G, J, C]
    decay = log_decay.exp().to(wide)  # from the chunk's start
    stepped_x = chunked_x * chunked_dt.to(wide).unflatten(1, (groups, -1)).movedim(-1, 1).unsqueeze(-1)

    added = _states_added(stepped_x, chunked_B, log_decay).view(-1, heads, head_dim, B.shape[-1])
    whole_decay = decay[..., -1].flatten(1)[..., None, None]  # [n, H, 1, 1]
    before, after = carry_states(added, whole_decay, chunks, initial_states)  # listing 1, step 3
    y = torch.zeros_like(chunked_x) if D is None else chunked_x * D.to(wide).view(groups, -1, 1)
    y.addcmul_(_read(before, chunked_C), decay.movedim(-1, 1).unsqueeze(-1))
    y.add_(_within_chunks(stepped_x, chunked_B, chunked_C, log_decay))
    y = collect(y.to(x.dtype).flatten(2, 3), chunks, x.shape[0])
    return ScanOutput(y, after[chunks.last_chunk_indices], after)


def ssd_step(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor, *, D: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Run the recurrence over one token of each of R requests; inputs are as in `ssd_scan`, with R in place of T.

    Args:
        state: [R, H, P, N] fp32, not modified.

    Returns:
        y [R, H, P] in x's dtype, and the new state [R, H, P, N] in state's dtype.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    decay = (dt * A).to(wide).exp()  # [R, H]
    groups = (B.shape[1], -1)
    stepped_x = (x * dt.unsqueeze(-1)).to(wide).flatten(1).unflatten(1, groups).unsqueeze(-1)  # [R, G, J*P, 1]
    decayed = (state.to(wide) * decay[..., None, None]).flatten(1, 2).unflatten(1, groups)  # [R, G, J*P, N]
    new_state = torch.addcmul(decayed, stepped_x, B.to(wide).unsqueeze(2))
    y = (new_state @ C.to(wide).unsqueeze(-1)).view(x.shape)
    if D is not None:
        y = y + x * D[:, None]
    return y.to(x.dtype), new_state.view(state.shape).to(state.dtype)


def _log_decay(dt: Tensor, A: Tensor) -> Tensor:
    """Return the logarithm of the decay from the chunk's start to the end of each token: [n, H, C].

    Computed in fp64: sums over a chunk of fast decay may reach thousands, and their differences must be accurate to
    1e-5.
    """
    return torch.cumsum(dt * A[:, None], dim=-1, dtype=torch.float64)


def _states_added(stepped_x: Tensor, B: Tensor, log_decay: Tensor) -> Tensor:
    """Return the contribution of a chunk's own tokens to the state at its end (listing 1, step 2): [n, G, J * P, N].

    `stepped_x` [n, C, G, J, P] is dt * x; `B` is [n, G, C, N]; `log_decay` is [n, G, J, C].
    """
    to_end = (log_decay[..., -1:] - log_decay).exp().to(B.dtype)
    weighted = stepped_x * to_end.movedim(-1, 1).unsqueeze(-1)
    return weighted.flatten(3).permute(0, 2, 3, 1) @ B


def _within_chunks(stepped_x: Tensor, B: Tensor, C: Tensor, log_decay: Tensor) -> Tensor:
    """Return the contribution of tokens of the same chunk to each token (listing 1, step 1): [n, C, G, J, P]."""
    scores = (C @ B.transpose(-1, -2)).tril()  # [n, G, c, s]
    weights = decay_between(log_decay, B.dtype) * scores.unsqueeze(2)  # [n, G, J, c, s]
    return (weights @ stepped_x.movedim(1, 3)).movedim(3, 1)


def _read(before: Tensor, C: Tensor) -> Tensor:
    """Return the undecayed contribution of the state before the chunk, [n, H, P, N], to each token: [n, C, G, J, P]."""
    groups, (heads, head_dim) = C.shape[1], before.shape[1:3]
    read = C @ before.view(-1, groups, heads // groups * head_dim, before.shape[-1]).transpose(-1, -2)  # [n, G, C, J*P]
    return read.unflatten(-1, (-1, head_dim)).transpose(1, 2)
