"""Calls of operators: random inputs at given sizes, the bytes they move or the operations they compute.

Letters: T tokens of a prefill, R requests that decode, H heads, P head dimension, N states.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from megatron_ext.ops.activation import squared_relu_
from megatron_ext.ops.causal_conv1d import CAUSAL_CONV1D
from megatron_ext.ops.gated_delta_rule import GATED_DELTA_RULE
from megatron_ext.ops.gated_norm import gated_norm
from megatron_ext.ops.paged_attention import build_paged_batch, paged_attention
from megatron_ext.ops.rotary import Heads, rotate_and_write
from megatron_ext.ops.sampling import SamplingMetadata, greedy_tokens, sample_tokens
from megatron_ext.ops.selective_scan import SELECTIVE_SCAN
from megatron_ext.ops.ssd import SSD
from megatron_ext.ops.state_copy import copy_rows
from megatron_ext.ops.state_slots import DecodeStates, PrefillStates, SnapshotPlaces, StateSlots
from megatron_ext.ops.step_size import step_sizes
from megatron_ext.ops.varlen import Resumes, pack_chunks

WINDOW, CHUNK, BLOCK = 4, 128, 64


@dataclass(frozen=True)
class Sizes:
    """Sizes of inputs; the defaults suit models of 2 billion parameters."""

    tokens: int = 8192
    requests: int = 64
    long_requests: int = 8  # that decode after `tokens`
    heads: int = 80
    head_dim: int = 64
    groups: int = 8
    states: int = 128
    layers: int = 20
    scan_channels: int = 5120
    scan_states: int = 16
    key_heads: int = 16
    value_heads: int = 32
    delta_dim: int = 128
    queries: int = 32
    keys: int = 8
    channels: int = 128
    words: int = 32_000
    prompts: int = 1  # of equal length, that `tokens` are split into
    kept: int = 0  # states that each prompt keeps, at multiples of a block

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution before SSD."""
        return self.heads * self.head_dim + 2 * self.groups * self.states


TINY = Sizes(128, 2, 2, 2, 16, 1, 16, 2, 32, 16, 1, 2, 16, 2, 1, 16, 64)


@dataclass(frozen=True)
class Call:
    """Call of an operator.

    Attributes:
        work: Function that makes the call.
        amount: Bytes that have to be read and written, or operations of the formula.
        unit: Unit of `amount`: "TB" or "TFLOP".
        has_reference: True if plain torch computes it in another way.
        snapshots: Pool that the kept states are written to, [prompts x kept, ...]; None without such states.
    """

    work: Callable[[], object]
    amount: float
    unit: str
    has_reference: bool = True
    snapshots: Tensor | None = None


class Calls:
    """Calls of all operators.

    Args:
        sizes: Sizes of inputs.
        dtype: Dtype of inputs.
        device: Device of inputs.
    """

    def __init__(self, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> None:
        self._e, self._dtype, self._device = sizes, dtype, device
        self._bytes = dtype.itemsize

    def all(self) -> dict[str, Callable[[], Call]]:
        """Return makers of calls by name; one at a time takes memory."""
        e = self._e
        return {
            f"matrix product of {e.tokens}": self._product,
            "copy of 1 GiB": self._copy,
            f"convolution, prefill of {e.tokens}": partial(self._convolution, is_prefill=True),
            f"convolution, {e.requests} decode": partial(self._convolution, is_prefill=False),
            **self.ssd(),
            f"selective scan, prefill of {e.tokens}": partial(self._scan, is_prefill=True),
            f"selective scan, {e.requests} decode": partial(self._scan, is_prefill=False),
            f"delta rule, prefill of {e.tokens}": partial(self._delta, is_prefill=True),
            f"delta rule, {e.requests} decode": partial(self._delta, is_prefill=False),
            f"attention, prefill of {e.tokens}": self._attention_prefill,
            f"attention, {e.long_requests} decode after {e.tokens}": self._attention_decode,
            f"gated norm of {e.tokens}": self._norm,
            f"squared relu of {e.tokens}": self._activation,
            f"step sizes of {e.requests}": self._step_sizes,
            f"keys and values of {e.requests} written": self._writes,
            f"states of {e.long_requests} copied, all layers": self._state_copy,
            f"best tokens of {e.requests}": self._best,
            f"tokens of {e.requests} drawn": self._draw,
        }

    def ssd(self) -> dict[str, Callable[[], Call]]:
        """Return makers of the calls of SSD; in order: without resume positions, as with blocks of 16 tokens."""
        e = self._e
        resumes = Resumes(BLOCK, torch.full((e.prompts,), e.tokens // e.prompts, device=self._device))
        return {
            f"ssd, prefill of {e.tokens}": partial(self._ssd, is_prefill=True, resumes=resumes),
            f"ssd in order, prefill of {e.tokens}": partial(self._ssd, is_prefill=True),
            f"ssd, {e.requests} decode": partial(self._ssd, is_prefill=False),
        }

    # Limits of the device

    def _product(self) -> Call:
        """Matrix product of an MLP."""
        rows, hidden = self._e.tokens, self._e.scan_channels // 2
        left, right = self._random(rows, hidden), self._random(4 * hidden, hidden)
        return Call(lambda: left @ right.mT, 2.0 * rows * hidden * 4 * hidden, "TFLOP", has_reference=False)

    def _copy(self) -> Call:
        size = 2**30 if self._e.tokens > 1000 else 2**12
        source = torch.zeros(size, dtype=torch.uint8, device=self._device)
        target = torch.empty_like(source)
        return Call(lambda: target.copy_(source), 2.0 * size, "TB", has_reference=False)

    # Recurrent layers

    def _convolution(self, *, is_prefill: bool) -> Call:
        e, channels = self._e, self._e.conv_channels
        x = self._random(e.tokens if is_prefill else e.requests, channels)
        inputs, state = (x, self._random(channels, WINDOW), self._random(channels)), (channels, WINDOW - 1)
        if is_prefill:
            return self._prefill(CAUSAL_CONV1D, inputs, state, self._dtype, (2.0 * x.numel() * self._bytes, "TB"))
        return self._decode(CAUSAL_CONV1D, inputs, state, self._dtype, 2.0 * x.numel() * self._bytes)

    def _ssd(self, *, is_prefill: bool, resumes: Resumes | None = None) -> Call:
        """Four operations a token, a channel and a state: two to update it, two to read it."""
        e = self._e
        rows = e.tokens if is_prefill else e.requests
        B, C = (self._random(rows, e.groups, e.states) for _ in range(2))
        inputs = (self._random(rows, e.heads, e.head_dim), self._steps(rows, e.heads), -self._steps(e.heads), B, C)
        state, options = (e.heads, e.head_dim, e.states), {"D": torch.ones(e.heads, device=self._device)}
        if is_prefill:
            amount = (4.0 * rows * e.heads * e.head_dim * e.states, "TFLOP")
            return self._prefill(SSD, inputs, state, torch.float32, amount, resumes, **options)
        return self._decode(SSD, inputs, state, torch.float32, **options)

    def _scan(self, *, is_prefill: bool) -> Call:
        e = self._e
        rows, channels = e.tokens if is_prefill else e.requests, e.scan_channels
        B, C = (self._random(rows, e.scan_states) for _ in range(2))
        inputs = (
            self._random(rows, channels),
            self._steps(rows, channels),
            -self._steps(channels, e.scan_states),
            B,
            C,
        )
        state, options = (channels, e.scan_states), {"D": torch.ones(channels, device=self._device)}
        if is_prefill:  # inputs and outputs; it computes more than it moves
            amount = (float(rows * channels * (2 * self._bytes + 4)), "TB")
            return self._prefill(SELECTIVE_SCAN, inputs, state, torch.float32, amount, **options)
        return self._decode(SELECTIVE_SCAN, inputs, state, torch.float32, **options)

    def _delta(self, *, is_prefill: bool) -> Call:
        """Six operations a token, a key channel and a value channel: recalled, added, read."""
        e = self._e
        rows = e.tokens if is_prefill else e.requests
        q, k = (self._random(rows, e.key_heads, e.delta_dim) for _ in range(2))
        v, g = self._random(rows, e.value_heads, e.delta_dim), -self._steps(rows, e.value_heads)
        inputs, state = (q, k, v, g, self._random(rows, e.value_heads).sigmoid()), (e.value_heads, *[e.delta_dim] * 2)
        if is_prefill:
            amount = (6.0 * rows * e.value_heads * e.delta_dim**2, "TFLOP")
            return self._prefill(GATED_DELTA_RULE, inputs, state, torch.float32, amount, normalize=True)
        return self._decode(GATED_DELTA_RULE, inputs, state, torch.float32, normalize=True)

    def _norm(self) -> Call:
        """Gated norm after SSD: two inputs, one output."""
        e, width = self._e, self._e.heads * self._e.head_dim
        y, gate, weight = self._random(e.tokens, width), self._random(e.tokens, width), self._random(width)
        work = partial(gated_norm, y, gate, weight, group_size=width // e.groups, eps=1e-5)
        return Call(work, 3.0 * y.numel() * self._bytes, "TB")

    def _activation(self) -> Call:
        """Call squared ReLU in place, between the products of an MLP."""
        x = torch.rand(self._e.tokens, 2 * self._e.scan_channels, dtype=self._dtype, device=self._device)
        return Call(partial(squared_relu_, x), 2.0 * x.numel() * self._bytes, "TB")

    def _step_sizes(self) -> Call:
        """Step sizes (dt) of a decode step; the launch dominates."""
        rows, heads = self._e.requests, self._e.heads
        dt, bias, rates = self._random(rows, heads), self._random(heads), self._steps(heads)
        return Call(partial(step_sizes, dt, bias, rates), float(dt.numel() * (self._bytes + 4)), "TB")

    def _writes(self) -> Call:
        """Cache writes of a decode step, without rotation."""
        e, rows = self._e, self._e.requests
        caches = [self._random(rows, BLOCK, e.keys, e.channels) for _ in range(2)]
        query = self._random(rows, e.keys, e.queries // e.keys, e.channels)
        heads = Heads(query, *(self._random(rows, e.keys, e.channels) for _ in range(2)))
        slots = torch.arange(rows, device=self._device) * BLOCK
        moved = 4.0 * rows * e.keys * e.channels * self._bytes
        return Call(partial(rotate_and_write, heads, None, *caches, slots), moved, "TB")

    def _state_copy(self) -> Call:
        """Snapshots of some requests, of all layers."""
        e, count = self._e, self._e.long_requests
        rows = torch.arange(count, device=self._device)
        conv = tuple(self._random(e.layers, count, e.conv_channels, WINDOW - 1) for _ in range(2))
        shape = (e.layers, count, e.heads, e.head_dim, e.states)
        states = tuple(torch.zeros(shape, device=self._device) for _ in range(2))
        moved = 2.0 * sum(pool.numel() * pool.element_size() for pool in (conv[0], states[0]))
        return Call(partial(copy_rows, conv, states, rows, rows), moved, "TB")

    # Attention and sampling

    def _attention_prefill(self) -> Call:
        e = self._e
        return Call(self._attention([e.tokens], 0), 4.0 * e.tokens**2 / 2 * e.queries * e.channels, "TFLOP")

    def _attention_decode(self) -> Call:
        e = self._e
        moved = 2.0 * e.long_requests * e.tokens * e.keys * e.channels * self._bytes
        return Call(self._attention([1] * e.long_requests, e.long_requests), moved, "TB")

    def _attention(self, lengths: list[int], num_decode: int) -> Callable[[], Tensor]:
        e, blocks = self._e, -(-self._e.tokens // BLOCK)
        tables = [list(range(row * blocks, (row + 1) * blocks)) for row in range(len(lengths))]
        caches = [self._random(len(lengths) * blocks, BLOCK, e.keys, e.channels) for _ in range(2)]
        q = self._random(sum(lengths), e.queries, e.channels)
        batch = build_paged_batch(tables, lengths, [e.tokens] * len(lengths), num_decode, BLOCK, self._device)
        return partial(paged_attention, q, *caches, batch, scale=e.channels**-0.5)

    def _best(self) -> Call:
        logits = self._random(self._e.requests, self._e.words)
        return Call(partial(greedy_tokens, logits), float(logits.numel() * self._bytes), "TB", has_reference=False)

    def _draw(self) -> Call:
        """Draw tokens as a captured step does, with top_p."""
        rows = self._e.requests
        logits = self._random(rows, self._e.words)
        one = torch.ones(rows, dtype=torch.float64, device=self._device)
        top_k = torch.zeros(rows, dtype=torch.int64, device=self._device)
        metadata = SamplingMetadata(0.8 * one, top_k, 0.9 * one, 0.5 * one)
        return Call(partial(sample_tokens, logits, metadata), float(logits.numel() * self._bytes), "TB")

    # Inputs

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=self._dtype, device=self._device)

    def _steps(self, *shape: int) -> Tensor:
        """Return fp32 values between 0.01 and 0.1."""
        return torch.rand(shape, device=self._device) * 0.09 + 0.01

    def _prefill(
        self,
        operator: object,
        inputs: tuple[Tensor, ...],
        state: tuple[int, ...],
        dtype: torch.dtype,
        amount: tuple[float, str],
        resumes: Resumes | None = None,
        **options: object,
    ) -> Call:
        """Prompts that begin without a state, and keep states if their sizes say so."""
        e, length, piece = self._e, self._e.tokens // self._e.prompts, CHUNK if self._e.prompts == 1 else BLOCK
        cut = [piece] * (length // piece) + [length % piece] * (length % piece > 0)
        slots = torch.arange(e.prompts, device=self._device)
        ends = [(prompt, place) for prompt in range(e.prompts) for place in range(1, e.kept + 1)]
        kept = SnapshotPlaces(
            torch.arange(len(ends), device=self._device),
            torch.arange(e.prompts + 1, device=self._device) * e.kept,
            torch.tensor([prompt * len(cut) + place - 1 for prompt, place in ends], device=self._device),
            torch.tensor([prompt * length + place * BLOCK for prompt, place in ends], device=self._device),
        )
        snapshots = torch.full((len(ends), *state), torch.nan, dtype=dtype, device=self._device) if ends else None
        states = PrefillStates(
            replace(pack_chunks([cut] * e.prompts, self._device), resumes=resumes),
            StateSlots(slots, torch.zeros_like(slots, dtype=torch.bool), kept if ends else None),
            torch.zeros(e.prompts, *state, dtype=dtype, device=self._device),
            snapshots,
        )
        return Call(partial(operator.prefill, *inputs, **options, states=states), *amount, snapshots=snapshots)

    def _decode(
        self,
        operator: object,
        inputs: tuple[Tensor, ...],
        state: tuple[int, ...],
        dtype: torch.dtype,
        moved: float = 0.0,
        **options: object,
    ) -> Call:
        """States are read and written; `moved` bytes in addition."""
        rows = self._e.requests
        live, slots = (
            torch.zeros(rows, *state, dtype=dtype, device=self._device),
            torch.arange(rows, device=self._device),
        )
        work = partial(operator.decode, *inputs, **options, states=DecodeStates(slots, live))
        return Call(work, 2.0 * live.numel() * live.element_size() + moved, "TB")
