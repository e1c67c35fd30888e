"""Oracles of the operators, computed token by token from their formulas in fp64, without code of the package."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

LENGTHS = [(1,), (3,), (63,), (64,), (65,), (500,), (64, 64), (65, 1, 500, 3, 63, 64), (1, 1, 2, 1)]
"""Odd lengths (shorter than the window, around a chunk, many chunks), alone and mixed."""


def recurrence(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    lengths: Sequence[int],
    initial_states: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Mamba-2's recurrence: y [T, H, P] and the state after every token [T, H, P, N], both fp64.

    Differentiable; x [T, H, P], dt [T, H], A [H], B and C [T, G, N], D [H], initial_states [S, H, P, N].
    """
    x, dt, A, B, C = (t.double() for t in (x, dt, A, B, C))
    heads_per_group = x.shape[1] // B.shape[1]
    B, C = (t.repeat_interleave(heads_per_group, dim=1) for t in (B, C))  # [T, H, N]
    ys, states = [], []
    for sequence, tokens in enumerate(torch.arange(sum(lengths)).split(tuple(lengths))):
        state = x.new_zeros(*x.shape[1:], B.shape[-1])
        if initial_states is not None:
            state = initial_states[sequence].double()
        for t in tokens.tolist():
            decay = torch.exp(dt[t] * A)
            state = decay[:, None, None] * state + dt[t][:, None, None] * x[t][:, :, None] * B[t][:, None, :]
            states.append(state)
            y = torch.einsum("hpn,hn->hp", state, C[t])
            ys.append(y if D is None else y + D.double()[:, None] * x[t])
    return torch.stack(ys), torch.stack(states)


def selective_recurrence(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    lengths: Sequence[int],
    initial_states: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Mamba-1's recurrence: y [T, D] and the state after every token [T, D, N], both fp64.

    Differentiable; u and delta [T, D], A [D, N], B and C [T, N], D [D], initial_states [S, D, N].
    """
    u, delta, A, B, C = (t.double() for t in (u, delta, A, B, C))
    ys, states = [], []
    for sequence, tokens in enumerate(torch.arange(sum(lengths)).split(tuple(lengths))):
        state = torch.zeros_like(A) if initial_states is None else initial_states[sequence].double()
        for t in tokens.tolist():
            state = torch.exp(delta[t][:, None] * A) * state + (delta[t] * u[t])[:, None] * B[t]
            states.append(state)
            y = state @ C[t]
            ys.append(y if D is None else y + D.double() * u[t])
    return torch.stack(ys), torch.stack(states)


def delta_recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    lengths: Sequence[int],
    initial_states: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule: y [T, H, V] and the state after every token [T, H, K, V], both fp64.

    Differentiable; q and k [T, G, K], v [T, H, V], g and beta [T, H], initial_states [S, H, K, V].
    """
    q, k, v, g, beta = (t.double() for t in (q, k, v, g, beta))
    q, k = (t.repeat_interleave(v.shape[1] // t.shape[1], dim=1) for t in (q, k))  # [T, H, K]
    ys, states = [], []
    for sequence, tokens in enumerate(torch.arange(sum(lengths)).split(tuple(lengths))):
        state = v.new_zeros(v.shape[1], k.shape[-1], v.shape[-1])
        if initial_states is not None:
            state = initial_states[sequence].double()
        for t in tokens.tolist():
            state = torch.exp(g[t])[:, None, None] * state
            error = v[t] - torch.einsum("hkv,hk->hv", state, k[t])
            state = state + beta[t][:, None, None] * k[t][:, :, None] * error[:, None, :]
            states.append(state)
            ys.append(torch.einsum("hkv,hk->hv", state, q[t]) / k.shape[-1] ** 0.5)
    return torch.stack(ys), torch.stack(states)


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lengths: Sequence[int],
    initial_states: Tensor | None = None,
    *,
    activate: bool = True,
) -> tuple[Tensor, Tensor]:
    """Causal depthwise convolution with SiLU, or without: y [T, Cn] and the state after every token [T, Cn, K-1], fp64.

    Differentiable; x [T, Cn], weight [Cn, K], bias [Cn], initial_states [S, Cn, K-1].
    """
    channels, window = weight.shape
    ys, states = [], []
    for sequence, tokens in enumerate(torch.arange(sum(lengths)).split(tuple(lengths))):
        past = torch.zeros(channels, window - 1, dtype=torch.float64)
        if initial_states is not None:
            past = initial_states[sequence].double()
        for t in tokens.tolist():
            columns = torch.cat([past, x[t].double()[:, None]], dim=1)
            y = (columns * weight.double()).sum(1)
            y = y if bias is None else y + bias.double()
            ys.append(y * torch.sigmoid(y) if activate else y)
            past = columns[:, 1:]
            states.append(past)
    return torch.stack(ys), torch.stack(states)


def attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of one row, query by query: [queries, Hq, D] in fp64.

    q [queries, Hq, D] are the last positions of keys and values [K, Hkv, D]; sinks [Hq].
    """
    shared = q.shape[1] // keys.shape[1]
    keys, values = (t.double().repeat_interleave(shared, dim=1) for t in (keys, values))
    out = []
    for i, query in enumerate(q.double()):
        seen = keys.shape[0] - q.shape[0] + i + 1
        first = 0 if window is None else max(0, seen - window)
        scores = torch.einsum("hd,khd->hk", query, keys[first:seen]) * scale
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None]], dim=1)
        weights = torch.softmax(scores, dim=-1)[:, : seen - first]
        out.append(torch.einsum("hk,khd->hd", weights, values[first:seen]))
    return torch.stack(out)


def assert_close(name: str, got: Tensor, want: Tensor, atol: float = 1e-4, rtol: float = 1e-4) -> None:
    """Fail, naming the worst element, unless |got - want| <= atol + rtol * |want| everywhere; NaN never passes."""
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    got, want = got.double().cpu(), want.double().cpu()
    excess = (got - want).abs() - rtol * want.abs()
    worst = excess.max().item() if got.numel() else 0.0
    assert worst <= atol, f"{name}: |got - want| - {rtol} * |want| is {worst:.3g} at worst, more than {atol}"
    assert not got.isnan().any(), f"{name}: NaN"


def assert_states_close(name: str, got: Tensor, want: Tensor) -> None:
    """Compare as assert_close does, with the tolerance for states."""
    assert_close(name, got, want, atol=1e-5)
