"""What every recurrent mixer does with an engine step and with a batch in training; kinds differ in their recurrence.

A mixer projects its input to the inputs of a convolution, to what else its scan is told about each token, and to a
gate; convolves, scans, gates and projects back. Its state is the convolution's last K-1 inputs and the recurrent state.

Letters: T tokens, S sequences of a prefill, R decoding requests, n chunks, Cn channels and K window of the convolution.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_ext.mixers.chunk_metadata import cut_chunks
from megatron_ext.mixers.recurrent import RecurrentContext, RecurrentStep
from megatron_ext.ops.causal_conv1d import conv_states_after
from megatron_ext.ops.varlen import PackedChunks


class Projected(NamedTuple):
    """The input projection, taken apart; views."""

    columns: Tensor  # [T, Cn], inputs of the convolution
    controls: tuple[Tensor, ...]  # [T, ...] each, what else the scan is told
    gate: Tensor  # [T, d_inner]

    def rows(self, start: int, end: int) -> Projected:
        """The same for some tokens."""
        tokens = slice(start, end)
        return Projected(self.columns[tokens], tuple(c[tokens] for c in self.controls), self.gate[tokens])


class Scanned(NamedTuple):
    """What a convolution and a scan over packed sequences give."""

    y: Tensor  # [T, d_inner]
    final_conv: Tensor  # [S, Cn, K-1]
    final_states: Tensor  # [S, ...] fp32
    chunk_states: Tensor  # [n, ...] fp32


class RecurrentMixer(MegatronModule):
    """See the module. A kind has `in_proj` and `out_proj`, and defines `split`, `scan`, `step` and `gated`.

    Attributes:
        layer_number: From 1, over all pipeline stages.
        pp_layer_offset: Layers of earlier stages.
        chunk_size: Tokens of a scan chunk in training; at inference the context's metadata decides.
    """

    layer_number: int
    pp_layer_offset: int
    chunk_size: int

    def split(self, projected: Tensor) -> Projected:
        """Take [T, .] apart."""
        raise NotImplementedError

    def scan(
        self,
        columns: Tensor,
        controls: tuple[Tensor, ...],
        chunks: PackedChunks,
        initial_conv: Tensor | None,
        initial_states: Tensor | None,
    ) -> Scanned:
        """Convolve and scan packed sequences, from zero states if none are given."""
        raise NotImplementedError

    def step(
        self, columns: Tensor, controls: tuple[Tensor, ...], conv: Tensor, states: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One token of each of R requests: y [R, d_inner], and the new states; the given ones are not modified."""
        raise NotImplementedError

    def gated(self, y: Tensor, gate: Tensor) -> Tensor:
        """[T, d_inner] each -> [T, d_inner], what `out_proj` gets."""
        raise NotImplementedError

    def forward(
        self, hidden_states: Tensor, inference_context: RecurrentContext | None = None, **_: object
    ) -> tuple[Tensor, Tensor | None]:
        """Mix [s, b, h] along s (training), or the packed tokens [T, 1, h] of an engine step.

        With a context the live states of the step's requests are advanced in place.

        Returns:
            Output of the same shape and a bias (None), as megatron's bias-dropout-add expects.
        """
        projected, _ = self.in_proj(hidden_states)
        if inference_context is not None and not self.training:
            y = self._forward_step(projected.squeeze(1), inference_context).unsqueeze(1)
        else:
            y = self._forward_batch(projected)
        return self.out_proj(y)

    def _forward_batch(self, projected: Tensor) -> Tensor:
        """[s, b, .] -> [s, b, d_inner]: b sequences of equal length, from zero states."""
        length, batch, _ = projected.shape
        columns, controls, gate = self.split(projected.transpose(0, 1).flatten(0, 1))  # [b * s, .]
        chunks = cut_chunks([0] * batch, [length] * batch, self.chunk_size, projected.device)
        y = self.scan(columns, controls, chunks, None, None).y
        return self.gated(y, gate).unflatten(0, (batch, length)).transpose(0, 1)

    def _forward_step(self, projected: Tensor, context: RecurrentContext) -> Tensor:
        """[T, .] -> [T, d_inner] for tokens packed as `RecurrentStep` says; padding comes out as zeros."""
        step, tokens = context.recurrent_step, self.split(projected)
        parts = []
        if step.num_decode:
            parts.append(self._decode(tokens.rows(0, step.num_decode), step, context))
        if step.chunks is not None:
            end = step.num_decode + step.chunks.sequences.num_tokens
            parts.append(self._prefill(tokens.rows(step.num_decode, end), step, context))
        y = parts[0] if len(parts) == 1 else torch.cat(parts)
        gated = self.gated(y, tokens.gate[: y.shape[0]])
        return F.pad(gated, (0, 0, 0, projected.shape[0] - y.shape[0]))

    def _prefill(self, tokens: Projected, step: RecurrentStep, context: RecurrentContext) -> Tensor:
        """All prefill of the step in one varlen call (HY-7); initial states are read before any is written (HY-8)."""
        layer, rows = self.layer_number - self.pp_layer_offset, step.prefill_rows
        conv_states, states = context.mamba_states_cache(layer)
        initial_conv, initial = (_where(step.has_initial_state, live[rows]) for live in (conv_states, states))
        initial_conv = initial_conv.to(tokens.columns.dtype)
        scanned = self.scan(tokens.columns, tokens.controls, step.chunks, initial_conv, initial.float())
        conv_states[rows] = scanned.final_conv.to(conv_states.dtype)
        states[rows] = scanned.final_states.to(states.dtype)
        if step.snapshots is not None:
            places = step.snapshots
            conv_slots, slots = context.mamba_snapshots(layer)
            first_tokens = step.chunks.sequences.cu_seqlens[places.sequences]
            kept_conv = conv_states_after(tokens.columns, places.tokens, first_tokens, initial_conv[places.sequences])
            conv_slots[places.slots] = kept_conv.to(conv_slots.dtype)
            slots[places.slots] = scanned.chunk_states[places.chunks].to(slots.dtype)
        return scanned.y

    def _decode(self, tokens: Projected, step: RecurrentStep, context: RecurrentContext) -> Tensor:
        """One token of each decoding request: [R, d_inner]."""
        conv_states, states = context.mamba_states_cache(self.layer_number - self.pp_layer_offset)
        rows = step.decode_rows
        conv = conv_states[rows].to(tokens.columns.dtype)
        y, conv, new_states = self.step(tokens.columns, tokens.controls, conv, states[rows].float())
        conv_states[rows] = conv.to(conv_states.dtype)
        states[rows] = new_states.to(states.dtype)
        return y


def _where(condition: Tensor, states: Tensor) -> Tensor:
    """States [S, ...], zero where `condition` [S] is false, whatever they hold there."""
    return states.where(condition.view(-1, *[1] * (states.dim() - 1)), 0)
