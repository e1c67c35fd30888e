"""Gated delta rule in plain torch, on any device.

Per value head (Yang, Kautz & Hatamizadeh 2024, "Gated Delta Networks", equation 10), with decay a_t = exp(g_t):

    S_t = a_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T        [K, V]
    y_t = S_t^T q_t / sqrt(K)                                          [V]

Within a chunk that begins with the state S (section 3.3 there; the UT transform of Yang et al. 2024, "Parallelizing
Linear Transformers with the Delta Rule", section 3.2), b_c being the decay from the chunk's start to place c:

    (I + L) U = diag(beta) (V - diag(b) K S),    L[c, s] = beta_c (k_c . k_s) b_c / b_s  for s < c
    y_c = (b_c S^T q_c + sum over s <= c of (q_c . k_s) b_c / b_s u_s) / sqrt(K)
    S <- b_C S + sum over s of b_C / b_s k_s u_s^T

Letters: T tokens, G key heads, H value heads, J = H / G value heads that share a key head, K key dimension, V value
dimension, S sequences, R requests, n chunks, C places in a chunk (c: the receiving place, s: the sending place).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ext.ops.chunked import (
    collect,
    decay_between,
    in_token_order,
    pad_steps_to_chunks,
    pad_to_chunks,
    pass_states,
)
from megatron_ext.ops.recurrence import ScanOutput
from megatron_ext.ops.varlen import PackedChunks

NORM_EPSILON = 1e-6  # as in flash-linear-attention and transformers, which models were trained with


def gated_delta_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    chunks: PackedChunks,
    *,
    initial_states: Tensor | None = None,
    normalize: bool = False,
) -> ScanOutput:
    """Run the recurrence over packed sequences, quadratic within chunks and linear between them. Differentiable.

    Args:
        q: [T, G, K]; may have rows after the last sequence, which are not read.
        k: [T, G, K], of length at most 1 unless `normalize` is True.
        v: [T, H, V].
        g: [T, H] fp32, logarithm of the decay, at most 0.
        beta: [T, H], between 0 and 1.
        chunks: Places of sequences and chunks on the token axis; results do not depend on the cuts.
        initial_states: [S, H, K, V], zeros if None.
        normalize: Divide q and k by their lengths.

    Returns:
        y, and states of [H, K, V].

    All sums are accumulated in fp32 (fp64 if v is fp64; states are then fp64, too).
    """
    wide = torch.promote_types(v.dtype, torch.float32)
    groups, rows, scale = k.shape[1], v.shape[0], k.shape[-1] ** -0.5
    chunked_q, chunked_k = (_pad_heads(_keyed(t, wide, normalize), chunks).unsqueeze(2) for t in (q, k))
    chunked_v = _pad_heads(v.to(wide), chunks).unflatten(1, (groups, -1))  # [n, G, J, C, V]; q and k [n, G, 1, C, K]
    strength = pad_steps_to_chunks(beta.to(wide), chunks).unflatten(1, (groups, -1)).unsqueeze(-1)  # [n, G, J, C, 1]
    log_decay = (
        pad_steps_to_chunks(g, chunks).cumsum(-1, dtype=torch.float64).unflatten(1, (groups, -1))
    )  # [n, G, J, C]
    decay = log_decay.exp().to(wide).unsqueeze(-1)  # [n, G, J, C, 1], from the chunk's start
    to_end = (log_decay[..., -1:] - log_decay).exp().to(wide).unsqueeze(-1)
    between = decay_between(log_decay, wide)  # [n, G, J, c, s]

    recalled = chunked_k @ chunked_k.mT * between * strength
    added, read = _solve(recalled, strength * chunked_v, strength * decay * chunked_k)
    parts = (added, read, chunked_k * to_end, decay[..., -1:, :])
    added, read, keys, last_decay = (t.flatten(1, 2) for t in parts)
    u, before, after = _carry(added, read, keys, last_decay, initial_states, chunks)
    y = ((chunked_q @ chunked_k.mT).tril() * between).flatten(1, 2) @ u
    y = (y + (chunked_q * decay).flatten(1, 2) @ before) * scale  # [n, H, C, V]
    y = collect(y.to(v.dtype).transpose(1, 2), chunks, rows)
    return ScanOutput(y, after[chunks.last_chunk_indices], after)


def gated_delta_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, *, normalize: bool = False
) -> tuple[Tensor, Tensor]:
    """Run the recurrence over one token of each of R requests; inputs are as in `gated_delta_scan`, with R for T.

    Args:
        state: [R, H, K, V], not modified.

    Returns:
        y [R, H, V] in v's dtype, and the new state [R, H, K, V] in state's dtype.
    """
    wide = torch.promote_types(v.dtype, torch.float32)
    shared = v.shape[1] // k.shape[1]
    q, k = (
        _keyed(t, wide, normalize).unsqueeze(2).expand(-1, -1, shared, -1).flatten(1, 2) for t in (q, k)
    )  # [R, H, K]
    decayed = state.to(wide) * g.exp().to(wide)[..., None, None]
    missing = v.to(wide) - (k.unsqueeze(-2) @ decayed).squeeze(-2)  # [R, H, V], the part of v that k does not recall
    new_state = torch.addcmul(decayed, k.unsqueeze(-1), (missing * beta.to(wide).unsqueeze(-1)).unsqueeze(-2))
    y = (q.unsqueeze(-2) @ new_state).squeeze(-2) * k.shape[-1] ** -0.5
    return y.to(v.dtype), new_state.to(state.dtype)


def _keyed(t: Tensor, dtype: torch.dtype, normalize: bool) -> Tensor:
    """Return queries or keys in `dtype`, of length 1 if `normalize` is True."""
    t = t.to(dtype)
    return t * torch.rsqrt(t.square().sum(-1, keepdim=True) + NORM_EPSILON) if normalize else t


def _pad_heads(t: Tensor, chunks: PackedChunks) -> Tensor:
    """Lay heads out in chunks: [T, heads, D] -> [n, heads, C, D]."""
    return pad_to_chunks(t, chunks).transpose(1, 2).contiguous()


def _solve(system: Tensor, *right: Tensor) -> tuple[Tensor, ...]:
    """Solve (I + L) X = right for several [..., C, D], L being the part of `system` [..., c, s] below its diagonal."""
    sizes = [side.shape[-1] for side in right]
    return torch.linalg.solve_triangular(system, torch.cat(right, -1), upper=False, unitriangular=True).split(sizes, -1)


def _carry(
    added: Tensor, read: Tensor, keys: Tensor, decay: Tensor, initial_states: Tensor | None, chunks: PackedChunks
) -> tuple[Tensor, Tensor, Tensor]:
    """Pass states from chunk to chunk.

    Args:
        added: [n, H, C, V], the tokens' writes if the state before the chunk were zero.
        read: [n, H, C, K], times that state is the part of the writes that the state already holds.
        keys: [n, H, C, K], decayed from their place to the chunk's end.
        decay: [n, H, 1, 1], of the whole chunk.
        initial_states: [S, H, K, V] or None.
        chunks: Places of the chunks.

    Returns:
        The tokens' writes, [n, H, C, V], and the states before and after each chunk, [n, H, K, V].
    """
    written = []

    def advance(state: Tensor, added: Tensor, read: Tensor, keys: Tensor, decay: Tensor) -> Tensor:
        written.append(added - read @ state)
        return torch.addcmul(keys.mT @ written[-1], state, decay)

    if initial_states is None:
        shape = (len(chunks.chunk_counts), added.shape[1], keys.shape[-1], added.shape[-1])
        initial_states = added.new_zeros(shape)
    before, after = pass_states(advance, (added, read, keys, decay), chunks, initial_states)
    return in_token_order(written, chunks), before, after
