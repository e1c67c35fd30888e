"""SC-10, SC-11: operators with states, every backend beside the reference, and what changes no bit.

Shapes are odd on purpose: fewer channels than a vector has lanes, one more, more than two vectors; sequences around
kernel chunks and pieces. Pools are poisoned: what no sequence owns must stay as it is, to the bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.mcore import platform
from megatron_ext.ops.causal_conv1d import CAUSAL_CONV1D
from megatron_ext.ops.gated_delta_rule import GATED_DELTA_RULE
from megatron_ext.ops.recurrence import Recurrence
from megatron_ext.ops.selective_scan import SELECTIVE_SCAN
from megatron_ext.ops.ssd import SSD
from megatron_ext.ops.state_slots import SnapshotPlaces, StateSlots
from tests.unit_tests.ops.backends import marks, usable
from tests.unit_tests.ops.conftest import moved
from tests.unit_tests.ops.oracles import assert_close
from tests.unit_tests.support.chunk_grid import cut_chunks

CHUNK = 32
LENGTHS = [(1,), (3,), (31,), (32,), (33,), (15, 16, 17), (63, 1, 64, 65, 2)]
STARTS = (0, 32, 7, 0, 64)  # absolute positions of the sequences' first tokens; 0: no state before
SLOTS = 9
DEVICE = platform.device()


@dataclass(frozen=True)
class Shape:
    """An operator and the sizes of its inputs."""

    operator: Recurrence
    sizes: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.operator.backends.operator}-{'x'.join(map(str, self.sizes))}"

    def build(self, tokens: int, dtype: torch.dtype) -> tuple[list[Tensor], Callable[..., tuple[Tensor, ...]], dict]:
        """Inputs by token; what the operator is called with, given those; its options."""
        return BUILDERS[self.operator.backends.operator](_Random(dtype), tokens, *self.sizes)

    def state(self) -> tuple[int, ...]:
        """Shape of one slot's state."""
        return STATES[self.operator.backends.operator](*self.sizes)


class _Random:
    def __init__(self, dtype: torch.dtype) -> None:
        self.generator, self.dtype = torch.Generator().manual_seed(5), dtype

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.dtype)

    def positive(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator) + 0.5


def _conv(r: _Random, tokens: int, channels: int, window: int):
    weight, bias = r.normal(channels, window), r.normal(channels) if window != 3 else None
    return [r.normal(tokens, channels)], lambda x: (x, weight, bias), {}


def _ssd(r: _Random, tokens: int, heads: int, width: int, groups: int, size: int):
    A, D = -r.positive(heads), r.normal(heads).float() if width != 16 else None
    inputs = [r.normal(tokens, heads, width), r.positive(tokens, heads) * 0.1]
    inputs += [r.normal(tokens, groups, size) * size**-0.5 for _ in range(2)]
    return inputs, lambda x, dt, b, c: (x, dt, A, b, c), {"D": D}


def _selective(r: _Random, tokens: int, channels: int, size: int):
    A, D = -r.positive(channels, size), r.normal(channels).float() if size != 8 else None
    inputs = [r.normal(tokens, channels), r.positive(tokens, channels) * 0.1, r.normal(tokens, size)]
    return [*inputs, r.normal(tokens, size)], lambda u, dt, b, c: (u, dt, A, b, c), {"D": D}


def _delta(r: _Random, tokens: int, groups: int, keys: int, heads: int, values: int):
    q, k = r.normal(tokens, groups, keys), r.normal(tokens, groups, keys)
    normalize = keys != 8
    if not normalize:
        q, k = (F.normalize(t.float(), dim=-1).to(r.dtype) for t in (q, k))
    inputs = [q, k, r.normal(tokens, heads, values), -r.positive(tokens, heads) * 0.1, r.positive(tokens, heads) * 0.5]
    return inputs, lambda *t: t, {"normalize": normalize}


BUILDERS = {"causal_conv1d": _conv, "ssd": _ssd, "selective_scan": _selective, "gated_delta_rule": _delta}
STATES: dict[str, Callable[..., tuple[int, ...]]] = {
    "causal_conv1d": lambda channels, window: (channels, window - 1),
    "ssd": lambda heads, width, groups, size: (heads, width, size),
    "selective_scan": lambda channels, size: (channels, size),
    "gated_delta_rule": lambda groups, keys, heads, values: (heads, keys, values),
}
SHAPES = [
    *(Shape(CAUSAL_CONV1D, sizes) for sizes in ((1, 4), (16, 2), (17, 3), (70, 4))),
    *(Shape(SSD, sizes) for sizes in ((1, 1, 1, 1), (4, 16, 2, 16), (6, 20, 2, 9), (3, 70, 1, 24), (2, 33, 2, 5))),
    *(Shape(SELECTIVE_SCAN, sizes) for sizes in ((1, 1), (16, 8), (33, 17), (20, 16))),
    *(Shape(GATED_DELTA_RULE, sizes) for sizes in ((1, 1, 1, 1), (2, 8, 4, 16), (1, 17, 3, 33), (2, 5, 2, 70))),
]
PAIRS = [
    pytest.param(shape, backend, id=f"{shape}-{backend}", marks=marks(backend))
    for shape in SHAPES
    for backend in usable(shape.operator.backends)
    if backend != "reference"
]
pairs = pytest.mark.parametrize(("shape", "backend"), PAIRS)


class Run:
    """Pools of one layer, and sequences that begin in slots 1, 3, 5, ..."""

    def __init__(self, shape: Shape, backend: str, lengths: Sequence[int], dtype: torch.dtype = torch.float32) -> None:
        self.shape, self.backend, self.lengths = shape, backend, lengths
        inputs, self.order, options = shape.build(sum(lengths), dtype)
        self.inputs = [t.split(tuple(lengths)) for t in inputs]
        self.options = {name: moved(value, DEVICE) for name, value in options.items()}
        generator = torch.Generator().manual_seed(6)
        states = torch.randn(SLOTS + 2, *shape.state(), generator=generator)
        self.live = states[: 2 * len(lengths) + 1].to(DEVICE)
        for i, start in enumerate(STARTS[: len(lengths)]):
            if start == 0:
                self.live[2 * i + 1] = torch.nan  # never read
        self.live[::2] = torch.nan  # unused
        self.snapshots = torch.full((SLOTS, *shape.state()), torch.nan, device=DEVICE)

    def prefill(
        self, rows: Sequence[int], begins: Sequence[int], ends: Sequence[int], *, padding: int = 0, keep: bool = True
    ) -> tuple[Tensor, ...]:
        """Outputs of tokens [begin, end) of some sequences, computed in one call with NaN after them."""
        spans = list(zip(rows, begins, ends, strict=True))
        counts = [end - begin for _, begin, end in spans]
        packed = [torch.cat([t[row][begin:end] for row, begin, end in spans]) for t in self.inputs]
        packed = [torch.cat([t, torch.full_like(t[:1], torch.nan).expand(padding, *t.shape[1:])]) for t in packed]
        starts = [STARTS[row] + begin for row, begin, _ in spans]
        chunks = cut_chunks(starts, counts, CHUNK, DEVICE)
        live = torch.tensor([2 * row + 1 for row in rows], device=DEVICE)
        slots = StateSlots(live, torch.tensor([s > 0 for s in starts], device=DEVICE), self._kept(starts, counts, keep))
        with self.shape.operator.backends.forced(self.backend):
            y = self.shape.operator.prefill(
                *moved(self.order(*packed), DEVICE),
                chunks=chunks,
                slots=slots,
                live=self.live,
                snapshots=self.snapshots,
                **self.options,
            )
        assert not y[sum(counts) :].any()
        return y[: sum(counts)].split(counts)

    def _kept(self, starts: Sequence[int], counts: Sequence[int], keep: bool) -> SnapshotPlaces | None:
        """Every boundary inside the call, up to the number of slots but two."""
        places, chunk, token = [], 0, 0
        for sequence, (start, count) in enumerate(zip(starts, counts, strict=True)):
            ends = [end - start for end in range(start + 1, start + count + 1) if end % CHUNK == 0]
            places += [(sequence, chunk + i, token + end) for i, end in enumerate(ends)]
            chunk += len(ends) + bool((start + count) % CHUNK)
            token += count
        rows = [(slot + 1, *place) for slot, place in enumerate(places[: SLOTS - 2])]
        return SnapshotPlaces(*torch.tensor(rows, device=DEVICE).T) if rows and keep else None

    def decode(self, rows: Sequence[int], position: int, *, as_slice: bool = False) -> Tensor:
        """Compute one token of some sequences."""
        tokens = [torch.cat([t[row][position : position + 1] for row in rows]) for t in self.inputs]
        slots = torch.tensor([2 * row + 1 for row in rows], device=DEVICE)
        where = slice(2 * rows[0] + 1, 2 * rows[0] + 2) if as_slice else slots
        with self.shape.operator.backends.forced(self.backend):
            return self.shape.operator.decode(
                *moved(self.order(*tokens), DEVICE), slots=where, live=self.live, **self.options
            )


def assert_pools_close(got: Run, want: Run, tolerance: float = 2e-5) -> None:
    """Check that equal sets of slots hold nearly equal states, and that the other slots are still poisoned."""
    for name in ("live", "snapshots"):
        one, other = getattr(got, name), getattr(want, name)
        assert torch.equal(one.isnan(), other.isnan()), name
        assert_close(name, one.nan_to_num(), other.nan_to_num(), atol=tolerance, rtol=tolerance)


@pairs
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_prefill_equals_the_reference(shape: Shape, backend: str, lengths: tuple[int, ...]) -> None:
    """HY-4, HY-7, HY-8, HY-9: outputs, last states and snapshots; rows after the sequences are not read."""
    runs = [Run(shape, name, lengths) for name in (backend, "reference")]
    whole = range(len(lengths)), [0] * len(lengths), lengths
    outputs = [torch.cat(run.prefill(*whole, padding=3)) for run in runs]
    assert_close("y", outputs[0], outputs[1], atol=2e-5, rtol=2e-5)
    assert_pools_close(*runs)


@pairs
def test_states_to_keep_may_be_listed_in_any_order(shape: Shape, backend: str) -> None:
    """HY-4: each goes to its own slot, those of one sequence included."""
    runs = [Run(shape, backend, (33, 97)) for _ in range(2)]
    places = runs[1]._kept([0, 32], [33, 97], True)
    assert places.sequences.tolist() == [0, 1, 1, 1]
    turned = SnapshotPlaces(
        *(column.flip(0) for column in (places.slots, places.sequences, places.chunks, places.tokens))
    )
    runs[1]._kept = lambda *_: turned
    outputs = [torch.cat(run.prefill([0, 1], [0, 0], [33, 97])) for run in runs]
    assert_close("y", outputs[0], outputs[1])
    assert_pools_close(*runs)


@pairs
@pytest.mark.parametrize("as_slice", [False, True])
def test_decode_equals_the_reference(shape: Shape, backend: str, as_slice: bool) -> None:
    runs = [Run(shape, name, (5, 5, 5)) for name in (backend, "reference")]
    for run in runs:
        run.prefill([0, 1, 2], [0, 0, 0], [1, 1, 1])
    for position in (1, 2):
        rows = [1] if as_slice else [2, 0, 1]
        got, want = (run.decode(rows, position, as_slice=as_slice) for run in runs)
        assert_close("y", got, want, atol=2e-5, rtol=2e-5)
    assert_pools_close(*runs)


@pairs
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_inputs_of_16_bits(shape: Shape, backend: str, dtype: torch.dtype) -> None:
    """Computed in fp32, given in the inputs' type: as far from the reference as one rounding."""
    runs = [Run(shape, name, (40, 3), dtype) for name in (backend, "reference")]
    got, want = (torch.cat(run.prefill([0, 1], [0, 0], [40, 3])) for run in runs)
    assert got.dtype == want.dtype == dtype
    assert_close("y", got.float(), want.float(), atol=0.01, rtol=0.01)
    got, want = (run.decode([0, 1], 2) for run in runs)
    assert got.dtype == want.dtype == dtype
    assert_close("y", got.float(), want.float(), atol=0.02, rtol=0.02)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


EXACT = [param for param in PAIRS if param.values[1] == "cpp"]
exact = pytest.mark.parametrize(("shape", "backend"), EXACT)


@exact
@pytest.mark.parametrize("count", [2, 3, 5])
def test_threads_change_no_bit(shape: Shape, backend: str, count: int) -> None:
    lengths = (63, 1, 64, 65, 2)
    outputs, pools = [], []
    for threads_of_run in (1, count):
        run = Run(shape, backend, lengths)
        with threads(threads_of_run):
            y = torch.cat(run.prefill(range(5), [0] * 5, lengths))
            outputs.append(torch.cat([y, run.decode([0, 2, 3], 40)]))
        pools.append(torch.cat([run.live, run.snapshots]).nan_to_num())
    assert torch.equal(*outputs)
    assert torch.equal(*pools)


@exact
def test_neighbours_change_no_bit(shape: Shape, backend: str) -> None:
    lengths = (63, 1, 64, 65, 2)
    together, alone = Run(shape, backend, lengths), Run(shape, backend, lengths)
    outputs = together.prefill(range(5), [0] * 5, lengths, keep=False)
    for row, output in enumerate(outputs):
        assert torch.equal(alone.prefill([row], [0], [lengths[row]], keep=False)[0], output)
    assert torch.equal(alone.live.nan_to_num(), together.live.nan_to_num())
    decoded = together.decode([3, 0], 1)
    assert torch.equal(torch.cat([alone.decode([row], 1, as_slice=True) for row in (3, 0)]), decoded)


@exact
@pytest.mark.parametrize("cuts", [(1,), (31, 32, 33), (16, 48, 64), (2, 3, 5, 40)], ids=str)
def test_cuts_change_no_bit(shape: Shape, backend: str, cuts: tuple[int, ...]) -> None:
    """Wherever a prompt is cut into steps, off the grid of kernel chunks too: HY-14, cache on beside cache off."""
    whole, pieces = Run(shape, backend, (65,)), Run(shape, backend, (65,))
    (want,) = whole.prefill([0], [0], [65], keep=False)
    edges = (0, *cuts, 65)
    got = [pieces.prefill([0], [begin], [end], keep=False)[0] for begin, end in itertools.pairwise(edges)]
    assert torch.equal(torch.cat(got), want)
    assert torch.equal(pieces.live[1], whole.live[1])


@exact
def test_a_decoded_token_leaves_the_state_of_a_prefilled_one(shape: Shape, backend: str) -> None:
    whole, stepped = Run(shape, backend, (20,)), Run(shape, backend, (20,))
    (want,) = whole.prefill([0], [0], [20])
    stepped.prefill([0], [0], [15])
    got = torch.cat([stepped.decode([0], position) for position in range(15, 20)])
    assert_close("y", got, want[15:], atol=1e-5, rtol=1e-5)
    assert torch.equal(stepped.live[1], whole.live[1])


@exact
def test_inputs_may_be_views(shape: Shape, backend: str) -> None:
    """Slices of a projection; and pools whose slots lie apart."""
    plain, viewed = Run(shape, backend, (40, 7)), Run(shape, backend, (40, 7))
    viewed.live = torch.stack([viewed.live, viewed.live], 1)[:, 1]
    order = viewed.order
    viewed.order = lambda *tokens: order(*(torch.cat([t, t], -1)[..., t.shape[-1] :] for t in tokens))
    (want, got) = (torch.cat(run.prefill([0, 1], [0, 0], [40, 7])) for run in (plain, viewed))
    assert torch.equal(got, want)
    assert torch.equal(viewed.decode([1, 0], 6), plain.decode([1, 0], 6))
    assert torch.equal(viewed.live.nan_to_num(), plain.live.nan_to_num())


@exact
def test_shapes_that_do_not_fit_are_refused(shape: Shape, backend: str) -> None:
    """Such shapes are refused as in plain torch: memory of others is not read."""
    run = Run(shape, backend, (4,))
    order = run.order
    run.order = lambda *tokens: tuple(t if i else t.repeat_interleave(2, -1) for i, t in enumerate(order(*tokens)))
    with pytest.raises(RuntimeError):
        run.prefill([0], [0], [4])
    run.order = order
    run.live = run.live[:1]
    with pytest.raises((IndexError, RuntimeError)):
        run.prefill([0], [0], [4])
