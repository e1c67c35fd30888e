"""Mamba-2's prefill parallel over tiles of tokens, beside its formula; on CPUs under Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_ext.mcore import platform
from megatron_ext.ops import triton
from megatron_ext.ops.ssd import SSD
from megatron_ext.ops.state_slots import PrefillStates, StateSlots
from megatron_ext.ops.triton.kernel_registry import TYPE_NAMES, Config, all_kernels, watch
from megatron_ext.ops.varlen import PackedChunks, PackedSequences, Resumes
from tests.unit_tests.ops.backends import interpreted
from tests.unit_tests.ops.conftest import moved
from tests.unit_tests.ops.oracles import recurrence
from tests.unit_tests.support.chunk_grid import cut_chunks, snapshot_places

pytestmark = [
    pytest.mark.skipif(
        triton.problem(platform.device()) is not None,
        reason=f"no kernel runs here: {triton.problem(platform.device())}",
    ),
    *interpreted(triton.NAME),
]

COVERED = ("chunk_cumsum", "state_passing", "chunk_scan")
IN_ORDER = {"ssd_prefill"}
KERNELS = {kernel.name: kernel for kernel in all_kernels()} if triton.can_be_imported() else {}
DTYPES = {name: dtype for dtype, name in TYPE_NAMES.items()}
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

LENGTHS = (1, 3, 15, 63, 64, 65, 17, 130, 197)  # tokens of the sequences
DONE = (0, 0, 0, 0, 0, 0, 16, 33, 64)  # of these computed by the first step
LIVE = (4, 0, 7, 2, 9, 5, 1, 8, 3)  # of 11 slots
# Sequence, its tokens, slot: at ends of tiles, two within one, in the tile that a step began in, at the very end.
KEPT = ((8, 128, 2), (8, 192, 5), (8, 130, 0), (8, 131, 3), (7, 40, 1), (7, 130, 7), (4, 64, 6), (0, 1, 9))
KEPT += ((7, 40, 10), (7, 130, 11), (8, 192, 12))  # a second slot at one place
KEPT_SLOTS = 14
PADDING = (7, 0)  # tokens of two sequences of padding, one in the middle and one at the end


class Layer:
    """Inputs, pools and references of one layer; steps compute spans of the sequences."""

    def __init__(
        self, dtype: torch.dtype, states: torch.dtype = FP32, shape: tuple[int, int, int, int] = (2, 1, 16, 16)
    ) -> None:
        heads, groups, head_dim, size = shape
        generator, total = torch.Generator().manual_seed(5), sum(LENGTHS)
        self.x, self.B, self.C = (
            torch.randn(total, *one, generator=generator).to(dtype)
            for one in ((heads, head_dim), (groups, size), (groups, size))
        )
        self.dt = torch.rand(total, heads, generator=generator) * 0.2 + 0.1
        self.A, self.D = -torch.rand(heads, generator=generator) * 0.05 - 0.01, torch.randn(heads, generator=generator)
        self.device, self.multiple = platform.device(), 64
        self.live = torch.full((11, heads, head_dim, size), torch.nan, dtype=states, device=self.device)
        self.snapshots = torch.full((KEPT_SLOTS, heads, head_dim, size), torch.nan, dtype=states, device=self.device)

    def truth(self, row: int) -> tuple[Tensor, Tensor]:
        """Outputs, and the state after every token, in fp64."""
        spans = [t.split(LENGTHS)[row] for t in (self.x, self.dt, self.B, self.C)]
        x, dt, b, c = spans
        return recurrence(x, dt, self.A, b, c, self.D, [len(x)])

    def _tokens(self, t: Tensor, spans: Sequence[tuple[int, int, int]]) -> Tensor:
        """Tokens of these spans and of padding, which are NaN, like tokens after the last sequence."""
        parts = [t.split(LENGTHS)[row][start:end] for row, start, end in spans]
        parts.insert(1, t.new_full((PADDING[0], *t.shape[1:]), torch.nan))
        return torch.cat([*parts, t.new_full((5, *t.shape[1:]), torch.nan)])

    def prefill(
        self, spans: Sequence[tuple[int, int, int]], kept: Sequence[tuple[int, int, int]] = (), bounded: bool = False
    ) -> list[Tensor]:
        """Compute (sequence, start, end) each; `kept` as KEPT. What each got; padding gets zeros."""
        rows, starts, ends = map(list, zip(*spans, strict=True))
        for values, padding in ((rows, -1), (starts, 0)):
            values.insert(1, padding)
        ends.insert(1, PADDING[0])
        lengths = [end - start for start, end in zip(starts, ends, strict=True)]
        first = torch.tensor([0, *lengths]).cumsum(0)
        chunks = self._chunks(starts, lengths, bounded)
        begun = {row: int(first[i]) - starts[i] for i, row in enumerate(rows)}
        places = [(rows.index(row), begun[row] + at, slot, -1) for row, at, slot in kept]
        slots = StateSlots(
            self._index([*(LIVE[row] if row >= 0 else -1 for row in rows), -1]),
            torch.tensor([*(start > 0 for start in starts), True], device=self.device),
            snapshot_places(places, len(rows) + 1, self.device, padding=[(1, KEPT_SLOTS - 1)]),
        )
        inputs = [self._tokens(t, spans) for t in (self.x, self.dt, self.B, self.C)]
        x, dt, b, c = moved(inputs, self.device)
        a, d = moved([self.A, self.D], self.device)
        with SSD.backends.forced(triton.NAME):
            y = SSD.prefill(x, dt, a, b, c, states=PrefillStates(chunks, slots, self.live, self.snapshots), D=d).cpu()
        found = list(y[: sum(lengths)].split(lengths))
        assert not found.pop(1).any()
        assert not y[sum(lengths) :].any()
        return found

    def _chunks(self, starts: Sequence[int], lengths: Sequence[int], bounded: bool) -> PackedChunks:
        """Chunks of the sequences, with an empty padding sequence at the end."""
        chunks = cut_chunks(starts, lengths, 16, self.device)
        sequences, cu_seqlens = chunks.sequences, chunks.sequences.cu_seqlens
        cu_seqlens = torch.cat([cu_seqlens, cu_seqlens[-1:]])
        if bounded:
            room = sum(lengths) + 5
            sequences = PackedSequences((room,) * (len(lengths) + 1), cu_seqlens, torch.zeros(room), True)
        else:
            sequences = replace(sequences, cu_seqlens=cu_seqlens)
        ends = self._index([start + length for start, length in zip(starts, lengths, strict=True)] + [70])
        return replace(chunks, sequences=sequences, resumes=Resumes(self.multiple, ends))

    def _index(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, device=self.device)


def close(name: str, got: Tensor, want: Tensor, tolerance: float) -> None:
    """Within so much of the largest there is, since sums of many terms may cancel."""
    error = (got.cpu().double() - want).abs().max().item() / want.abs().max().clamp(min=1.0).item()
    assert error <= tolerance, f"{name}: off by {error:.2e} of the largest, {tolerance:.0e} allowed"


OUTPUTS = {BF16: 2**-6, FP16: 2**-9}  # the interpreter cuts bf16 off where devices round it, and knows no tf32
STATES = {BF16: 2**-15, FP16: 1e-5}  # by inputs
ROUNDINGS = {FP32: 0.0, BF16: 2**-6, FP16: 2**-9}  # of what is stored; in each of two steps


def run(layer: Layer, bounded: bool = False) -> None:
    """Two steps, each compared with the formula; then every state there is."""
    began = [(row, 0, done) for row, done in enumerate(DONE) if done]
    rest = [(row, DONE[row], length) for row, length in enumerate(LENGTHS)]
    truths = [layer.truth(row) for row in range(len(LENGTHS))]
    tolerance, allowed = (one[layer.x.dtype] + ROUNDINGS[layer.live.dtype] for one in (OUTPUTS, STATES))
    for spans, kept in ((began, ()), (rest, KEPT)):
        for (row, start, end), y in zip(spans, layer.prefill(spans, kept, bounded), strict=True):
            close(f"outputs {start} to {end} of {row}", y, truths[row][0][start:end], tolerance)
    for row, slot in enumerate(LIVE):
        close(f"sequence {row}", layer.live[slot], truths[row][1][-1], allowed)
    for row, at, slot in KEPT:
        close(f"sequence {row} at {at}", layer.snapshots[slot], truths[row][1][at - 1], allowed)
    assert layer.live[[slot for slot in range(11) if slot not in LIVE]].isnan().all()
    kept_slots = {slot for _, _, slot in KEPT}
    assert layer.snapshots[[slot for slot in range(KEPT_SLOTS) if slot not in kept_slots]].isnan().all()


def variants() -> list[tuple[Config, dict[str, str], torch.dtype]]:
    """Every configuration of the outputs, with every type of states."""
    if not KERNELS:
        return []
    found = [(config, dict(types)) for config, types in KERNELS["chunk_scan"].variants()]
    return [(config, types, states) for config, types in found for states in (FP32, DTYPES[types["T"]])]


def name_of(value: object) -> str:
    return value.name if isinstance(value, Config) else value["T"] if isinstance(value, dict) else str(value)


@pytest.mark.parametrize(
    ("dtype", "heads", "bounded"), [(BF16, 9, False), (FP16, 1, True)], ids=["bf16", "fp16 in fixed places"]
)
def test_tiles_equal_the_formula(dtype: torch.dtype, heads: int, bounded: bool) -> None:
    """CU-1, CU-2: lengths around tiles, states kept at their ends and within, padding; more heads than a program."""
    with watch() as launches:
        run(Layer(dtype, shape=(heads, 1, 16, 16)), bounded)
    assert {launch.kernel for launch in launches} == set(COVERED)


@pytest.mark.kernels
@pytest.mark.parametrize(("config", "types", "states"), variants(), ids=name_of)
def test_every_configuration_of_tiles_computes_the_same(
    config: Config, types: dict[str, str], states: torch.dtype
) -> None:
    """CU-2: all compiled configurations agree, with more channels than a program has, and partial tiles of states."""
    with watch() as launches:
        run(Layer(DTYPES[types["T"]], states, (2, 2, 80, config["N"] - 16)))
    assert ("chunk_scan", config, tuple(sorted(types.items()))) in [launch[:3] for launch in launches]
    assert ("state_passing", types["T"], TYPE_NAMES[states]) in {
        (launch.kernel, dict(launch.types).get("T"), dict(launch.types).get("S")) for launch in launches
    }


@pytest.mark.usefixtures("fixed_order_dot")
def test_bits_do_not_depend_on_cuts_at_absolute_multiples() -> None:
    """CU-2: from a start within a tile, with any kept states and any neighbours.

    The kept state is the one with which the sequence continues. A cut elsewhere changes the last bits, which shows that
    this test can fail.
    """
    whole, parts, other = (Layer(BF16) for _ in range(3))
    for layer in (whole, parts, other):
        layer.prefill([(8, 0, 37)])
    wanted, _ = whole.prefill([(8, 37, 197), (5, 0, 65)], KEPT[:4])
    (first,) = parts.prefill([(8, 37, 128)])
    assert torch.equal(parts.live[LIVE[8]], whole.snapshots[2])
    (rest,) = parts.prefill([(8, 128, 197)])
    assert torch.equal(torch.cat([first, rest]), wanted)
    assert torch.equal(parts.live[LIVE[8]], whole.live[LIVE[8]])
    other.prefill([(8, 37, 100)])
    other.prefill([(8, 100, 197)])
    assert not torch.equal(other.live[LIVE[8]], whole.live[LIVE[8]])


def test_fast_decay_is_summed_exactly() -> None:
    """CU-2: after a token that forgets everything, logarithms in fp32 alone would be off by a hundredth."""
    layer = Layer(FP16)
    layer.A[:] = torch.tensor([-200_000.0, -2_000.0])
    layer.dt[:] = torch.tensor([2e-6, 2e-4])
    layer.dt[::40] = 1.0
    run(layer)


def test_a_state_of_another_is_seen() -> None:
    """Negative control: two sequences go on from each other's states."""
    layer = Layer(BF16)
    layer.prefill([(7, 0, 33), (8, 0, 64)])
    layer.live[[LIVE[7], LIVE[8]]] = layer.live[[LIVE[8], LIVE[7]]]
    found, _ = layer.prefill([(7, 33, 130), (8, 64, 197)])
    with pytest.raises(AssertionError, match="allowed"):
        close("swapped", found, layer.truth(7)[0][33:], OUTPUTS[BF16])


@pytest.mark.parametrize(
    ("dtype", "shape", "multiple", "expected"),
    [
        (BF16, (2, 1, 16, 16), 64, set(COVERED)),
        (BF16, (2, 1, 16, 16), 256, set(COVERED)),
        (BF16, (2, 1, 16, 16), 96, IN_ORDER),  # 32 would not be the end of a tile
        (FP32, (2, 1, 16, 16), 64, IN_ORDER),
        (BF16, (2, 1, 18, 16), 64, IN_ORDER),
        (FP16, (2, 1, 16, 144), 64, IN_ORDER),
    ],
)
def test_the_kernel_is_chosen_by_model_and_block(
    dtype: torch.dtype, shape: tuple[int, int, int, int], multiple: int, expected: set[str]
) -> None:
    """CU-1, CU-3: model and block decide for one token, and for many."""
    for spans in ([(0, 0, 1)], [(8, 0, 197)]):
        layer = Layer(dtype, shape=shape)
        layer.multiple = multiple
        with watch() as launches:
            layer.prefill(spans)
        assert {launch.kernel for launch in launches} == expected
