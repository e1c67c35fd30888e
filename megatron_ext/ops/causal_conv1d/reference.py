"""Depthwise causal convolution with SiLU in plain torch, on any device.

    y_t = SiLU(bias + sum_k weight[:, k] x_{t-K+1+k})       [Cn]

and the same without SiLU.

The state of a sequence is its last K-1 inputs (oldest first), from this call or before it.
Letters: T tokens, Cn channels, K window, S sequences, R requests.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.ops.recurrence import ScanOutput
from megatron_ext.ops.varlen import PackedChunks, PackedSequences


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    chunks: PackedChunks,
    *,
    initial_states: Tensor | None = None,
    activate: bool = True,
) -> ScanOutput:
    """Convolve packed sequences independently of each other. Differentiable.

    Args:
        x: [T, Cn]; may have rows after the last sequence, which are not read.
        weight: [Cn, K].
        bias: [Cn] or None.
        chunks: Places of sequences and chunks on the token axis; sequences may be shorter than the window.
        initial_states: [S, Cn, K-1], zeros if None; not modified.
        activate: True to apply SiLU to the result.

    Returns:
        y, and states of [Cn, K-1], copies and never views of x or of the initial states; all in x's dtype.
    """
    sequences = chunks.sequences
    if initial_states is None:
        initial_states = x.new_zeros(len(sequences.lengths), x.shape[1], weight.shape[1] - 1)
    starts, owners = sequences.cu_seqlens[:-1], chunks.chunk_seq_idx
    if sequences.has_static_shapes:  # only the device knows lengths: each token with the K-1 inputs before it
        tokens, sequence = torch.arange(x.shape[0], device=x.device), sequences.seq_idx
        before = conv_states_after(x, tokens, starts[sequence], initial_states[sequence])
        y, _ = causal_conv1d_step(x, weight, bias, before, activate=activate)
    else:
        y = _convolve_packed(x, weight, bias, sequences, initial_states)
        y = (F.silu(y) if activate else y).to(x.dtype)
        y = F.pad(y, (0, 0, 0, x.shape[0] - y.shape[0])) if y.shape[0] < x.shape[0] else y
    states = conv_states_after(x, chunks.cu_chunk_seqlens[1:], starts[owners], initial_states[owners])
    return ScanOutput(y, states[chunks.last_chunk_indices], states)


def causal_conv1d_step(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, *, activate: bool = True
) -> tuple[Tensor, Tensor]:
    """Convolve one token of each of R requests; inputs are as in `causal_conv1d`, with R in place of T.

    Args:
        state: [R, Cn, K-1], not modified.

    Returns:
        y [R, Cn] in x's dtype, and the new state [R, Cn, K-1] in state's dtype.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    columns = torch.cat([state.to(x.dtype), x.unsqueeze(-1)], dim=-1)  # [R, Cn, K]
    y = (columns.to(wide) * weight.to(wide)).sum(-1)
    if bias is not None:
        y = y + bias.to(wide)
    return (F.silu(y) if activate else y).to(x.dtype), columns[..., 1:].to(state.dtype)


def conv_states_after(x: Tensor, tokens: Tensor, first_tokens: Tensor, initial_states: Tensor) -> Tensor:
    """Return the states of sequences after some of their tokens: the last K-1 inputs there.

    Args:
        x: [T, Cn], inputs of the packed sequences.
        tokens: [n] int64, number of tokens before each state on the packed axis.
        first_tokens: [n] int64, start of the sequence on that axis.
        initial_states: [n, Cn, K-1], of the sequence; the source of older inputs.

    Returns:
        [n, Cn, K-1], in x's dtype.
    """
    kept = initial_states.shape[2]
    columns = torch.arange(kept, device=x.device) - kept
    rows = tokens[:, None] + columns  # [n, K-1]
    before = rows - first_tokens[:, None]  # position relative to the sequence's first token of this call
    from_tokens = x[rows.clamp(min=0)].transpose(1, 2)  # [n, Cn, K-1]
    columns = (before + kept).clamp(0, kept - 1)[:, None].expand(-1, x.shape[1], -1)
    from_initial = initial_states.to(x.dtype).gather(2, columns)
    return from_initial.where((before < 0)[:, None], from_tokens)


def _convolve_packed(
    x: Tensor, weight: Tensor, bias: Tensor | None, sequences: PackedSequences, initial_states: Tensor
) -> Tensor:
    """Convolve sequences with their K-1 earlier inputs in front of each, in fp32 or wider: [T, Cn]."""
    window, wide = weight.shape[1], torch.promote_types(x.dtype, torch.float32)
    earlier = initial_states.to(x.dtype).transpose(1, 2)
    parts = zip(earlier.unbind(0), x[: sequences.num_tokens].split(sequences.lengths), strict=True)
    extended = torch.cat([rows for pair in parts for rows in pair])  # [T + S*(K-1), Cn]
    y = _convolve(extended.to(wide), weight.to(wide), None if bias is None else bias.to(wide))
    if len(sequences.lengths) > 1:
        y = y.index_select(0, torch.arange(len(sequences.seq_idx), device=x.device) + sequences.seq_idx * (window - 1))
    return y


def _convolve(extended: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Slide the window over all rows, also across sequence boundaries (the caller drops those): [rows-K+1, Cn]."""
    window = weight.shape[1]
    num_outputs = extended.shape[0] - window + 1
    oldest = extended[:num_outputs]
    y = oldest * weight[:, 0] if bias is None else torch.addcmul(bias, oldest, weight[:, 0])
    for k in range(1, window):
        y.addcmul_(extended[k : k + num_outputs], weight[:, k])
    return y
