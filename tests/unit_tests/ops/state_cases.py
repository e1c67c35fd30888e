"""Operators with states: inputs and formulas, and steps of sequences for the parity tests of kernels.

Some sequences begin; all go on, with states kept on the way; some decode one token. Pools hold NaN in unwritten places;
Triton's kernels get rows and slots of padding in every step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.mcore import platform
from megatron_ext.mixers.recurrent import cut_between
from megatron_ext.ops import triton
from megatron_ext.ops.causal_conv1d import CAUSAL_CONV1D, PLAIN_CONV1D
from megatron_ext.ops.gated_delta_rule import GATED_DELTA_RULE
from megatron_ext.ops.recurrence import Recurrence
from megatron_ext.ops.selective_scan import SELECTIVE_SCAN
from megatron_ext.ops.ssd import SSD
from megatron_ext.ops.state_slots import DecodeStates, PrefillStates, StateSlots
from megatron_ext.ops.varlen import PackedChunks, pack_chunks
from tests.unit_tests.ops.conftest import moved
from tests.unit_tests.ops.oracles import (
    assert_close,
    convolution,
    delta_recurrence,
    recurrence,
    selective_recurrence,
)
from tests.unit_tests.support.chunk_grid import snapshot_places

LENGTHS = (1, 3, 15, 16, 17, 63, 64, 65)  # tokens of the sequences, a decoded one included
DONE = (0, 0, 0, 0, 16, 31, 1, 33)  # computed by the first step
DECODED = (1, 3, 5, 7)  # sequences whose last token the third step computes
# Sequence, its tokens, slot of the snapshots: both ends of a sequence, several in a tile, two at one place.
KEPT = ((7, 34, 2), (7, 48, 5), (6, 17, 0), (3, 15, 3), (5, 62, 1), (7, 64, 6), (7, 36, 4), (7, 36, 7), (7, 64, 8))
KEPT_SLOTS = 10
LIVE = (4, 0, 7, 2, 9, 5, 1, 8)  # of 11 slots

ROUNDINGS = {torch.float32: 0.0, torch.bfloat16: 2**-7, torch.float16: 2**-10}  # of states that were stored

OPERATORS = {
    "causal_conv1d": CAUSAL_CONV1D,
    "plain_conv1d": PLAIN_CONV1D,
    "ssd": SSD,
    "selective_scan": SELECTIVE_SCAN,
    "gated_delta_rule": GATED_DELTA_RULE,
}

Truth = Callable[[Sequence[Tensor], Sequence[int]], tuple[Tensor, Tensor]]


@dataclass
class Operator:
    """An operator with its weights; tokens -> its arguments; the formula: outputs, and the state after every token."""

    run: Recurrence
    tokens: list[Tensor]  # [T, ...]
    order: Callable[..., tuple[Tensor | None, ...]]
    options: dict[str, object]
    truth: Truth
    state: tuple[int, ...]  # shape


def operator(name: str, size: int | tuple[int, ...], dtype: torch.dtype = torch.float32) -> Operator:
    """Operator with slow decay.

    Args:
        name: One of `OPERATORS`.
        size: Number of states (columns of the convolution's window, channels of a key); or all sizes, of which some
            leave out an option.
        dtype: Type of the inputs.
    """
    generator, total, sizes = torch.Generator().manual_seed(3), sum(LENGTHS), size if isinstance(size, tuple) else ()

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator) + 0.5

    run = OPERATORS[name]
    if name in ("causal_conv1d", "plain_conv1d"):
        channels, window = sizes or (130, size)  # more channels than a program has
        weight, bias = normal(channels, window), normal(channels) if window != 3 else None
        activate = name == "causal_conv1d"
        truth: Truth = lambda t, n: convolution(t[0], weight, bias, n, activate=activate)  # noqa: E731
        tokens = [normal(total, channels)]
        return Operator(run, tokens, lambda x: (x, weight, bias), {}, truth, (channels, window - 1))
    if name == "ssd":
        heads, width, groups, states = sizes or (4, 18, 2, size)
        A, D = -uniform(heads) * 0.05, uniform(heads) if width != 16 else None
        tokens = [normal(total, heads, width), uniform(total, heads) * 0.2]
        tokens += [normal(total, groups, states) for _ in range(2)]
        truth = lambda t, n: recurrence(t[0], t[1], A, t[2], t[3], D, n)  # noqa: E731
        return Operator(run, tokens, lambda x, dt, b, c: (x, dt, A, b, c), {"D": D}, truth, (heads, width, states))
    if name == "gated_delta_rule":
        groups, keys, heads, values = sizes or (2, size, 4, 18 if size < 65 else 32)
        tokens = [normal(total, groups, keys), normal(total, groups, keys), normal(total, heads, values)]
        tokens += [-uniform(total, heads) * 0.01, uniform(total, heads) * 0.3]
        if not sizes or keys != 8:
            return Operator(run, tokens, lambda *t: t, {"normalize": True}, _delta, (heads, keys, values))
        tokens[:2] = (F.normalize(one.float(), dim=-1).to(dtype) for one in tokens[:2])
        truth = lambda t, n: delta_recurrence(*t, n)  # noqa: E731
        return Operator(run, tokens, lambda *t: t, {"normalize": False}, truth, (heads, keys, values))
    channels, states = sizes or (20, size)
    A, D = -uniform(channels, states) * 0.05, uniform(channels) if not sizes or states != 8 else None
    tokens = [normal(total, channels), uniform(total, channels) * 0.2, normal(total, states), normal(total, states)]
    truth = lambda t, n: selective_recurrence(t[0], t[1], A, t[2], t[3], D, n)  # noqa: E731
    return Operator(run, tokens, lambda u, dt, b, c: (u, dt, A, b, c), {"D": D}, truth, (channels, states))


def _delta(tokens: Sequence[Tensor], lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    q, k = (t.double() * (t.double().square().sum(-1, keepdim=True) + 1e-6).rsqrt() for t in tokens[:2])
    return delta_recurrence(q, k, *tokens[2:], lengths)


def _with_padding(chunks: PackedChunks) -> PackedChunks:
    """Append an empty padding sequence to the chunks."""
    sequences, first = chunks.sequences, chunks.sequences.cu_seqlens
    return replace(chunks, sequences=replace(sequences, cu_seqlens=torch.cat([first, first[-1:]])))


class Steps:
    """Pools of one layer, and the steps that advance them.

    Snapshots lie `gap` elements apart, as those of one layer do in an arena. Only Triton's kernels get padding.
    """

    def __init__(
        self,
        name: str,
        size: int | tuple[int, ...],
        dtype: torch.dtype,
        states: torch.dtype,
        backend: str = triton.NAME,
        gap: int = 0,
    ) -> None:
        self.operator, self.device, self.dtype = operator(name, size, dtype), platform.device(), dtype
        self.backend, self.has_padding = backend, backend == triton.NAME
        self.parts = list(zip(*(t.split(LENGTHS) for t in self.operator.tokens), strict=True))
        shape = self.operator.state
        self.live = torch.full((11, *shape), torch.nan, dtype=states, device=self.device)
        gap += self.live[0].numel()
        memory = torch.empty(KEPT_SLOTS * gap, dtype=states, device=self.device)
        self.snapshots = memory.as_strided((KEPT_SLOTS, *shape), (gap, *self.live.stride()[1:])).fill_(torch.nan)

    @functools.cached_property
    def truths(self) -> list[tuple[Tensor, Tensor]]:
        """Outputs and states of each sequence by the formula."""
        return [self.operator.truth(part, [len(part[0])]) for part in self.parts]

    def prefill(
        self,
        rows: Sequence[int],
        starts: Sequence[int],
        ends: Sequence[int],
        kept: Sequence[tuple[int, int, int]] = (),
        padding: bool = True,
    ) -> Tensor:
        """Compute tokens [start, end) of some sequences; `kept` as KEPT. With padding, a sequence of it comes last."""
        padding &= self.has_padding
        lengths = [end - start for start, end in zip(starts, ends, strict=True)]
        stops = [sorted({tokens for kept_row, tokens, _ in kept if kept_row == row}) for row in rows]
        chunks = pack_chunks(
            [cut_between(start, n, 16, s) for start, n, s in zip(starts, lengths, stops, strict=True)], self.device
        )
        chunk_ends, behind = chunks.cu_chunk_seqlens.tolist()[1:], [-1] * padding
        if padding:
            chunks = _with_padding(chunks)
        first = [sum(lengths[:index]) - start for index, start in enumerate(starts)]
        tokens_of = [(rows.index(row), first[rows.index(row)] + tokens, slot) for row, tokens, slot in kept]
        places = [(sequence, tokens, slot, chunk_ends.index(tokens)) for sequence, tokens, slot in tokens_of]
        slots = StateSlots(
            self._index([*(LIVE[row] for row in rows), *behind]),
            torch.tensor([*(start > 0 for start in starts), *(False for _ in behind)], device=self.device),
            snapshot_places(places, len(rows) + padding, self.device, padding=[(1, KEPT_SLOTS - 1)] * padding),
        )
        states = PrefillStates(chunks, slots, self.live, self.snapshots)
        with self.operator.run.backends.forced(self.backend):
            return self.operator.run.prefill(*self._inputs(rows, starts, ends), states=states, **self._options()).cpu()

    def decode(self, rows: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Compute one token of some sequences, after two rows of padding; of a single one by a slice of its slot."""
        padding = 2 * self.has_padding
        inputs = self._inputs(rows, positions, [position + 1 for position in positions], padding=padding)
        slots = self._index([*([-1] * padding), *(LIVE[row] for row in rows)])
        if slots.numel() == 1:
            slots = slice(LIVE[rows[0]], LIVE[rows[0]] + 1)
        with self.operator.run.backends.forced(self.backend):
            y = self.operator.run.decode(*inputs, states=DecodeStates(slots, self.live), **self._options()).cpu()
        assert not y[:padding].any()
        return y[padding:]

    def run(self) -> None:
        """All three steps, each compared with the truth."""
        began = [row for row, done in enumerate(DONE) if done]
        y = self.prefill(began, [0] * len(began), [DONE[row] for row in began])
        self.check_outputs("first step", y, began, [0] * len(began), [DONE[row] for row in began])
        rows = [row for row in range(len(LENGTHS)) if LENGTHS[row] - (row in DECODED) > DONE[row]]
        ends = [LENGTHS[row] - (row in DECODED) for row in rows]
        y = self.prefill(rows, [DONE[row] for row in rows], ends, KEPT)
        self.check_outputs("second step", y, rows, [DONE[row] for row in rows], ends)
        for decoded in (DECODED[:-1], DECODED[-1:]):
            last = [LENGTHS[row] - 1 for row in decoded]
            y = self.decode(decoded, last)
            self.check_outputs("decode", y, decoded, last, [LENGTHS[row] for row in decoded])
        self.check_states()

    def check_outputs(
        self, name: str, y: Tensor, rows: Sequence[int], starts: Sequence[int], ends: Sequence[int]
    ) -> None:
        """Check the outputs of a step, within the rounding of its dtype and of its initial states: of their largest."""
        spans = zip(rows, starts, ends, strict=True)
        want = torch.cat([self.truths[row][0][start:end] for row, start, end in spans])
        tolerance = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 3e-3}[self.dtype]
        rounding = ROUNDINGS[self.live.dtype] * want.abs().max().item()
        assert_close(name, y, want, atol=tolerance + rounding, rtol=tolerance)

    def check_states(self) -> None:
        """Live states and snapshots where they belong, and nothing beside them."""
        for row, slot in enumerate(LIVE):
            self._check_state(f"sequence {row}", self.live[slot], self.truths[row][1][LENGTHS[row] - 1])
        for row, tokens, slot in KEPT:
            self._check_state(f"sequence {row} at {tokens}", self.snapshots[slot], self.truths[row][1][tokens - 1])
        assert self.live[[slot for slot in range(11) if slot not in LIVE]].isnan().all()
        kept = {slot for _, _, slot in KEPT}
        assert self.snapshots[[slot for slot in range(KEPT_SLOTS) if slot not in kept]].isnan().all()

    def _check_state(self, name: str, got: Tensor, want: Tensor) -> None:
        tolerance = {torch.float32: 1e-4, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}[got.dtype]
        rounding = 2 * ROUNDINGS[got.dtype] * want.abs().max().item()  # they are rounded in each of three steps
        assert_close(name, got.cpu(), want, atol=tolerance / 10 + rounding, rtol=tolerance)

    def _inputs(
        self, rows: Sequence[int], starts: Sequence[int], ends: Sequence[int], padding: int = 0
    ) -> list[Tensor | None]:
        tokens = []
        for i, t in enumerate(self.operator.tokens):
            spans = [self.parts[row][i][start:end] for row, start, end in zip(rows, starts, ends, strict=True)]
            tokens.append(torch.cat([t.new_full((padding, *t.shape[1:]), torch.nan), *spans]))
        return [moved(t, self.device) for t in self.operator.order(*tokens)]

    def _options(self) -> dict[str, object]:
        return {name: moved(value, self.device) for name, value in self.operator.options.items()}

    def _index(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, device=self.device)
