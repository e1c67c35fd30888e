"""Operators at the sizes that the large models have: inputs, what they move and what they compute.

Letters: T tokens of a prefill, R requests that decode, H heads, P head dimension, N states, Cn channels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

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
from megatron_ext.ops.state_slots import StateSlots
from megatron_ext.ops.step_size import step_sizes
from megatron_ext.ops.varlen import Resumes, pack_chunks

WINDOW, CHUNK, BLOCK = 4, 128, 64


@dataclass(frozen=True)
class Extents:
    """Sizes of inputs; the defaults are those of the large models."""

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

    @property
    def conv_channels(self) -> int:
        """Cn of the convolution before SSD."""
        return self.heads * self.head_dim + 2 * self.groups * self.states


TINY = Extents(128, 2, 2, 2, 16, 1, 16, 2, 32, 16, 1, 2, 16, 2, 1, 16, 64)


@dataclass(frozen=True)
class Case:
    """Call of an operator.

    Attributes:
        work: Function that makes the call.
        amount: Bytes that have to be read and written, or operations of the recurrence's formula.
        unit: Unit of `amount`: "TB" or "TFLOP".
        has_reference: True if plain torch computes it in another way.
    """

    work: Callable[[], object]
    amount: float
    unit: str
    has_reference: bool = True


class Maker:
    """Makes cases; inputs are random, of a type that most weights have.

    Args:
        extents: Sizes.
        dtype: Dtype of inputs.
        device: Device of inputs.
    """

    def __init__(self, extents: Extents, dtype: torch.dtype, device: torch.device) -> None:
        self._e, self._dtype, self._device = extents, dtype, device
        self._bytes = dtype.itemsize

    def cases(self) -> dict[str, Callable[[], Case]]:
        """Cases by name; each is made when called, so that only one at a time takes memory."""
        e = self._e
        return {
            f"matrix product of {e.tokens}": self.product,
            "copy of 1 GiB": self.copy,
            f"convolution, prefill of {e.tokens}": self.conv_prefill,
            f"convolution, {e.requests} decode": self.conv_decode,
            f"ssd, prefill of {e.tokens}": self.ssd_prefill,
            f"ssd in order, prefill of {e.tokens}": self.ssd_in_order,
            f"ssd, {e.requests} decode": self.ssd_decode,
            f"selective scan, prefill of {e.tokens}": self.scan_prefill,
            f"selective scan, {e.requests} decode": self.scan_decode,
            f"delta rule, prefill of {e.tokens}": self.delta_prefill,
            f"delta rule, {e.requests} decode": self.delta_decode,
            f"attention, prefill of {e.tokens}": self.attention_prefill,
            f"attention, {e.long_requests} decode behind {e.tokens}": self.attention_decode,
            f"gated norm of {e.tokens}": self.norm,
            f"squared relu of {e.tokens}": self.activation,
            f"step sizes of {e.requests}": self.step_sizes,
            f"keys and values of {e.requests} written": self.writes,
            f"states of {e.long_requests} copied, all layers": self.state_copy,
            f"best tokens of {e.requests}": self.best,
            f"tokens of {e.requests} drawn": self.draw,
        }

    # What the device can do

    def product(self) -> Case:
        """A matrix product as an MLP has it."""
        rows, hidden = self._e.tokens, self._e.scan_channels // 2
        left, right = self._random(rows, hidden), self._random(4 * hidden, hidden)
        return Case(lambda: left @ right.mT, 2.0 * rows * hidden * 4 * hidden, "TFLOP", has_reference=False)

    def copy(self) -> Case:
        """Read once, written once."""
        size = 2**30 if self._e.tokens > 1000 else 2**12
        source = torch.zeros(size, dtype=torch.uint8, device=self._device)
        target = torch.empty_like(source)
        return Case(lambda: target.copy_(source), 2.0 * size, "TB", has_reference=False)

    # Recurrent layers

    def conv_prefill(self) -> Case:
        """Causal convolution of a prefill that starts from zeros."""
        tokens, channels = self._e.tokens, self._e.conv_channels
        x, weight, bias = self._random(tokens, channels), self._random(channels, WINDOW), self._random(channels)
        options = self._places((channels, WINDOW - 1), self._dtype)
        work = lambda: CAUSAL_CONV1D.prefill(x, weight, bias, **options)  # noqa: E731 - what a case is
        return Case(work, 2.0 * x.numel() * self._bytes, "TB")

    def conv_decode(self) -> Case:
        """Causal convolution of a decode step, with in-place state updates."""
        rows, channels = self._e.requests, self._e.conv_channels
        x, weight, bias = self._random(rows, channels), self._random(channels, WINDOW), self._random(channels)
        live, slots = self._states((channels, WINDOW - 1), self._dtype)
        work = lambda: CAUSAL_CONV1D.decode(x, weight, bias, slots=slots, live=live)  # noqa: E731
        return Case(work, 2.0 * (x.numel() + live.numel()) * self._bytes, "TB")

    def ssd_prefill(self) -> Case:
        """Four operations a token, a channel and a state: two to add to it, two to read it."""
        return self._ssd_prefill(Resumes(BLOCK, torch.full((1,), self._e.tokens, device=self._device)))

    def ssd_in_order(self) -> Case:
        """SSD prefill without resume positions, as with blocks of 16 tokens."""
        return self._ssd_prefill(None)

    def _ssd_prefill(self, resumes: Resumes | None) -> Case:
        e = self._e
        inputs, skip = self._ssd(e.tokens)
        options = self._places((e.heads, e.head_dim, e.states), torch.float32, resumes)
        work = lambda: SSD.prefill(*inputs, D=skip, **options)  # noqa: E731
        return Case(work, 4.0 * e.tokens * e.heads * e.head_dim * e.states, "TFLOP")

    def ssd_decode(self) -> Case:
        """States are read and written."""
        e = self._e
        inputs, skip = self._ssd(e.requests)
        live, slots = self._states((e.heads, e.head_dim, e.states), torch.float32)
        return Case(lambda: SSD.decode(*inputs, slots=slots, live=live, D=skip), 2.0 * live.numel() * 4, "TB")

    def _ssd(self, rows: int) -> tuple[tuple[Tensor, ...], Tensor]:
        e = self._e
        B, C = (self._random(rows, e.groups, e.states) for _ in range(2))
        x, dt, A = self._random(rows, e.heads, e.head_dim), self._steps(rows, e.heads), -self._steps(e.heads)
        return (x, dt, A, B, C), torch.ones(e.heads, device=self._device)

    def scan_prefill(self) -> Case:
        """Inputs and outputs; what it computes is more."""
        e = self._e
        inputs, skip = self._scan(e.tokens)
        options = self._places((e.scan_channels, e.scan_states), torch.float32)
        work = lambda: SELECTIVE_SCAN.prefill(*inputs, D=skip, **options)  # noqa: E731
        return Case(work, float(e.tokens * e.scan_channels * (2 * self._bytes + 4)), "TB")

    def scan_decode(self) -> Case:
        """States are read and written."""
        e = self._e
        inputs, skip = self._scan(e.requests)
        live, slots = self._states((e.scan_channels, e.scan_states), torch.float32)
        work = lambda: SELECTIVE_SCAN.decode(*inputs, slots=slots, live=live, D=skip)  # noqa: E731
        return Case(work, 2.0 * live.numel() * 4, "TB")

    def _scan(self, rows: int) -> tuple[tuple[Tensor, ...], Tensor]:
        e = self._e
        B, C = (self._random(rows, e.scan_states) for _ in range(2))
        u, delta = self._random(rows, e.scan_channels), self._steps(rows, e.scan_channels)
        return (u, delta, -self._steps(e.scan_channels, e.scan_states), B, C), torch.ones(
            e.scan_channels, device=self._device
        )

    def delta_prefill(self) -> Case:
        """Six operations a token, a key channel and a value channel: recalled, added, read."""
        e = self._e
        inputs = self._delta(e.tokens)
        options = self._places((e.value_heads, e.delta_dim, e.delta_dim), torch.float32)
        work = lambda: GATED_DELTA_RULE.prefill(*inputs, normalize=True, **options)  # noqa: E731
        return Case(work, 6.0 * e.tokens * e.value_heads * e.delta_dim**2, "TFLOP")

    def delta_decode(self) -> Case:
        """States are read and written."""
        e = self._e
        inputs = self._delta(e.requests)
        live, slots = self._states((e.value_heads, e.delta_dim, e.delta_dim), torch.float32)
        work = lambda: GATED_DELTA_RULE.decode(*inputs, slots=slots, live=live, normalize=True)  # noqa: E731
        return Case(work, 2.0 * live.numel() * 4, "TB")

    def _delta(self, rows: int) -> tuple[Tensor, ...]:
        e = self._e
        q, k = (self._random(rows, e.key_heads, e.delta_dim) for _ in range(2))
        v, g = self._random(rows, e.value_heads, e.delta_dim), -self._steps(rows, e.value_heads)
        return q, k, v, g, self._random(rows, e.value_heads).sigmoid()

    def norm(self) -> Case:
        """Gated norm after SSD: two inputs, one output."""
        e = self._e
        width = e.heads * e.head_dim
        y, gate, weight = self._random(e.tokens, width), self._random(e.tokens, width), self._random(width)
        work = lambda: gated_norm(y, gate, weight, group_size=width // e.groups, eps=1e-5)  # noqa: E731
        return Case(work, 3.0 * y.numel() * self._bytes, "TB")

    def activation(self) -> Case:
        """Between the products of an MLP, in place."""
        x = torch.rand(self._e.tokens, 2 * self._e.scan_channels, dtype=self._dtype, device=self._device)
        return Case(lambda: squared_relu_(x), 2.0 * x.numel() * self._bytes, "TB")

    def step_sizes(self) -> Case:
        """Step sizes (dt) of a decode step; the launch dominates."""
        rows, heads = self._e.requests, self._e.heads
        dt, bias, rates = self._random(rows, heads), self._random(heads), self._steps(heads)
        return Case(lambda: step_sizes(dt, bias, rates), float(dt.numel() * (self._bytes + 4)), "TB")

    def writes(self) -> Case:
        """Cache writes of a decode step, without rotation."""
        e, rows = self._e, self._e.requests
        caches = [self._random(rows, BLOCK, e.keys, e.channels) for _ in range(2)]
        query = self._random(rows, e.keys, e.queries // e.keys, e.channels)
        heads = Heads(query, *(self._random(rows, e.keys, e.channels) for _ in range(2)))
        slots = torch.arange(rows, device=self._device) * BLOCK
        moved = 4.0 * rows * e.keys * e.channels * self._bytes
        return Case(lambda: rotate_and_write(heads, None, *caches, slots), moved, "TB")

    def state_copy(self) -> Case:
        """Snapshots of so many requests, of all layers."""
        e, count = self._e, self._e.long_requests
        rows = torch.arange(count, device=self._device)
        conv = tuple(self._random(e.layers, count, e.conv_channels, WINDOW - 1) for _ in range(2))
        shape = (e.layers, count, e.heads, e.head_dim, e.states)
        states = tuple(torch.zeros(shape, device=self._device) for _ in range(2))
        moved = 2.0 * sum(pool.numel() * pool.element_size() for pool in (conv[0], states[0]))
        return Case(lambda: copy_rows(conv, states, rows, rows), moved, "TB")

    # Attention and sampling

    def attention_prefill(self) -> Case:
        """Scores and sums of all earlier keys."""
        e = self._e
        work = self._attention([e.tokens], num_decode=0)
        return Case(work, 4.0 * e.tokens**2 / 2 * e.queries * e.channels, "TFLOP")

    def attention_decode(self) -> Case:
        """Keys and values are read."""
        e = self._e
        work = self._attention([1] * e.long_requests, num_decode=e.long_requests)
        return Case(work, 2.0 * e.long_requests * e.tokens * e.keys * e.channels * self._bytes, "TB")

    def _attention(self, lengths: list[int], num_decode: int) -> Callable[[], Tensor]:
        e, blocks = self._e, -(-self._e.tokens // BLOCK)
        tables = [list(range(row * blocks, (row + 1) * blocks)) for row in range(len(lengths))]
        caches = [self._random(len(lengths) * blocks, BLOCK, e.keys, e.channels) for _ in range(2)]
        q = self._random(sum(lengths), e.queries, e.channels)
        kv_lengths = [e.tokens] * len(lengths)
        batch = build_paged_batch(tables, lengths, kv_lengths, num_decode, BLOCK, self._device)
        return lambda: paged_attention(q, *caches, batch, scale=e.channels**-0.5)

    def best(self) -> Case:
        """Logits are read."""
        logits = self._random(self._e.requests, self._e.words)
        return Case(lambda: greedy_tokens(logits), float(logits.numel() * self._bytes), "TB", has_reference=False)

    def draw(self) -> Case:
        """Draw tokens as a captured step does, with a nucleus."""
        rows = self._e.requests
        logits = self._random(rows, self._e.words)
        one = torch.ones(rows, dtype=torch.float64, device=self._device)
        metadata = SamplingMetadata(
            0.8 * one, torch.zeros(rows, dtype=torch.int64, device=self._device), 0.9 * one, 0.5 * one
        )
        return Case(lambda: sample_tokens(logits, metadata), float(logits.numel() * self._bytes), "TB")

    # Inputs

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=self._dtype, device=self._device)

    def _steps(self, *shape: int) -> Tensor:
        """Between 0.01 and 0.1, fp32."""
        return torch.rand(shape, device=self._device) * 0.09 + 0.01

    def _places(self, state: tuple[int, ...], dtype: torch.dtype, resumes: Resumes | None = None) -> dict[str, object]:
        """Options of one sequence that begins in slot 0 without a state; no state is kept on the way."""
        tokens = self._e.tokens
        cuts = [CHUNK] * (tokens // CHUNK) + [tokens % CHUNK] * (tokens % CHUNK > 0)
        slot, nothing = torch.zeros(1, dtype=torch.int64, device=self._device), torch.zeros(1, device=self._device) > 0
        live = torch.zeros(1, *state, dtype=dtype, device=self._device)
        chunks = replace(pack_chunks([cuts], self._device), resumes=resumes)
        return {"chunks": chunks, "slots": StateSlots(slot, nothing), "live": live, "snapshots": None}

    def _states(self, state: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        rows = self._e.requests
        return torch.zeros(rows, *state, dtype=dtype, device=self._device), torch.arange(rows, device=self._device)
