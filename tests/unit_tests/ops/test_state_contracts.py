"""The contract of operators with states, over every backend there is: prefill and decode in pools of slots.

Pools are filled with NaN: what a backend reads without an owner, or writes beside its slots, is seen. The truth is
each operator's formula, token by token in fp64, over every sequence as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from megatron_ext.mcore import platform
from megatron_ext.ops.state_slots import SnapshotPlaces, StateSlots
from tests.unit_tests.ops.backends import interpreted, usable
from tests.unit_tests.ops.conftest import moved
from tests.unit_tests.ops.oracles import assert_close, assert_states_close
from tests.unit_tests.ops.state_cases import operator
from tests.unit_tests.support.chunk_grid import cut_chunks

CHUNK = 16
LENGTHS = (70, 2, 33, 1)  # tokens of the sequences; the first tokens of some are computed by an earlier step
DONE = (32, 1, 0, 0)
LIVE_SLOTS = (4, 0, 2, 5)  # of 7
SNAPSHOT_SLOT, SNAPSHOT_AT = 1, 48  # of 3; tokens of the first sequence

SIZES = {"causal_conv1d": 4, "plain_conv1d": 4, "ssd": 5, "selective_scan": 5, "gated_delta_rule": 5}
OPERATORS = {name: operator(name, size, total=sum(LENGTHS)) for name, size in SIZES.items()}
BACKENDS = [
    pytest.param(name, backend, marks=interpreted(backend))
    for name, one in OPERATORS.items()
    for backend in usable(one.run.backends)
]


class Pools:
    """Live states and snapshots of one layer, and the steps that advance them.

    Snapshots lie `gap` elements apart, as those of one layer do in an arena.
    """

    def __init__(self, name: str, backend: str, dtype: torch.dtype = torch.float32, gap: int = 48) -> None:
        self.case, self.backend, self.device = OPERATORS[name], backend, platform.device()
        sequences = self.case.tokens[0].split(LENGTHS)
        parts = [[t.split(LENGTHS)[i] for t in self.case.tokens] for i in range(len(sequences))]
        self.truths = [self.case.truth(part, [len(part[0])]) for part in parts]
        shape = self.truths[0][1].shape[1:]
        self.live = torch.full((7, *shape), torch.nan, dtype=dtype, device=self.device)
        size = shape.numel()
        self.memory = torch.empty((2 * (size + gap) + size,), dtype=dtype, device=self.device)
        strides = (size + gap, *self.live.stride()[1:])
        self.snapshots = self.memory.as_strided((3, *shape), strides).fill_(torch.nan)
        self.parts = parts

    def prefill(self, rows: Sequence[int], starts: Sequence[int], ends: Sequence[int], keep: bool = False) -> Tensor:
        """Compute tokens [start, end) of some sequences in one call."""
        lengths = [end - start for start, end in zip(starts, ends, strict=True)]
        tokens = self._tokens(rows, starts, ends)
        chunks = cut_chunks(starts, lengths, CHUNK, self.device)
        places = None
        if keep:
            chunk = SNAPSHOT_AT // CHUNK - starts[0] // CHUNK - 1
            places = SnapshotPlaces(*self._index([SNAPSHOT_SLOT], [0], [chunk], [SNAPSHOT_AT - starts[0]]))
        (live,) = self._index([LIVE_SLOTS[row] for row in rows])
        slots = StateSlots(live, torch.tensor([start > 0 for start in starts], device=self.device), places)
        with self.case.run.backends.forced(self.backend):
            y = self.case.run.prefill(
                *tokens, chunks=chunks, slots=slots, live=self.live, snapshots=self.snapshots, **self._options()
            )
        return y.cpu()

    def decode(self, rows: Sequence[int], positions: Sequence[int], *, as_slice: bool = False) -> Tensor:
        """Compute one token of some sequences."""
        tokens = self._tokens(rows, positions, [position + 1 for position in positions])
        (slots,) = self._index([LIVE_SLOTS[row] for row in rows])
        where = slice(LIVE_SLOTS[rows[0]], LIVE_SLOTS[rows[0]] + 1) if as_slice else slots
        with self.case.run.backends.forced(self.backend):
            return self.case.run.decode(*tokens, slots=where, live=self.live, **self._options()).cpu()

    def _tokens(self, rows: Sequence[int], starts: Sequence[int], ends: Sequence[int]) -> tuple[Tensor, ...]:
        spans = list(zip(rows, starts, ends, strict=True))
        inputs = [torch.cat([self.parts[row][i][start:end] for row, start, end in spans]) for i in range(len(self))]
        return moved(self.case.order(*inputs), self.device)

    def _options(self) -> dict[str, object]:
        return {name: moved(value, self.device) for name, value in self.case.options.items()}

    def _index(self, *lists: Sequence[int]) -> list[Tensor]:
        return [torch.tensor(values, device=self.device) for values in lists]

    def __len__(self) -> int:
        return len(self.case.tokens)

    def expected(self, rows: Sequence[int], starts: Sequence[int], ends: Sequence[int]) -> Tensor:
        spans = zip(rows, starts, ends, strict=True)
        return torch.cat([self.truths[row][0][start:end] for row, start, end in spans])

    def check_live(self, ends: Sequence[int]) -> None:
        """Every sequence's slot holds its state after so many tokens; the other slots are as they were."""
        for row, end in enumerate(ends):
            assert_states_close(f"sequence {row}", self.live[LIVE_SLOTS[row]].cpu(), self.truths[row][1][end - 1])
        others = [slot for slot in range(7) if slot not in LIVE_SLOTS]
        assert self.live[others].isnan().all()


@pytest.mark.parametrize(("name", "backend"), BACKENDS)
def test_prefill_begins_and_ends_in_its_slots(name: str, backend: str) -> None:
    """HY-7, HY-8, HY-11: fresh and continuing sequences in one call; a fresh one never reads its slot."""
    pools = Pools(name, backend)
    y = pools.prefill([0, 1], [0, 0], DONE[:2])
    assert_close("first step", y, pools.expected([0, 1], [0, 0], DONE[:2]))
    y = pools.prefill(range(4), DONE, LENGTHS, keep=True)
    assert_close("second step", y, pools.expected(range(4), DONE, LENGTHS))
    pools.check_live(LENGTHS)


@pytest.mark.parametrize(("name", "backend"), BACKENDS)
def test_snapshots_go_to_their_slots_alone(name: str, backend: str) -> None:
    """HY-4, HY-9: the state at a block boundary inside the call; no other slot is written."""
    pools = Pools(name, backend)
    pools.memory.fill_(torch.nan)
    pools.prefill([0, 1], [0, 0], DONE[:2])
    assert pools.memory.isnan().all()
    pools.prefill(range(4), DONE, LENGTHS, keep=True)
    kept = pools.snapshots[SNAPSHOT_SLOT].cpu()
    assert_states_close("snapshot", kept, pools.truths[0][1][SNAPSHOT_AT - 1])
    assert pools.memory.isnan().sum() == pools.memory.numel() - kept.numel()


@pytest.mark.parametrize(("name", "backend"), BACKENDS)
def test_snapshots_beyond_two_billion_elements(name: str, backend: str) -> None:
    """An arena may be larger than 32-bit offsets reach; only the pages of snapshots are touched."""
    near, far = (Pools(name, backend, torch.bfloat16, gap) for gap in (0, 2**31 // SNAPSHOT_SLOT + 16))
    for pools in (near, far):
        pools.prefill([0, 1], [0, 0], DONE[:2])
        pools.prefill(range(4), DONE, LENGTHS, keep=True)
    assert not near.snapshots[SNAPSHOT_SLOT].isnan().any()
    torch.testing.assert_close(far.snapshots, near.snapshots, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("as_slice", [False, True])
@pytest.mark.parametrize(("name", "backend"), BACKENDS)
def test_decode_advances_its_slots_in_place(name: str, backend: str, as_slice: bool) -> None:
    pools = Pools(name, backend)
    rows = [0] if as_slice else [2, 0]
    starts = [LENGTHS[row] - 1 for row in rows]
    pools.prefill(range(4), [0] * 4, [starts[rows.index(row)] if row in rows else LENGTHS[row] for row in range(4)])
    y = pools.decode(rows, starts, as_slice=as_slice)
    assert_close("decode", y, pools.expected(rows, starts, [LENGTHS[row] for row in rows]))
    pools.check_live(LENGTHS)


@pytest.mark.parametrize(("name", "backend"), BACKENDS)
def test_states_in_16_bits_are_rounded_in_the_pool_only(name: str, backend: str) -> None:
    """HY-14: computed in fp32, stored in the pool's type."""
    pools = Pools(name, backend, torch.bfloat16)
    pools.prefill([0], [0], [LENGTHS[0]])
    want = pools.truths[0][1][-1]
    assert_close("live state", pools.live[LIVE_SLOTS[0]].cpu(), want, atol=1e-4, rtol=0.01)
    assert not torch.equal(pools.live[LIVE_SLOTS[0]].cpu().double(), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("name", "backend"), BACKENDS)
def test_states_of_16_bits_are_read_and_written_back(name: str, backend: str, dtype: torch.dtype) -> None:
    """HY-14: a continued prefill, a snapshot and decodes write such states; each slot holds its last token's state."""
    pools = Pools(name, backend, dtype)
    end = LENGTHS[0]
    pools.prefill([0], [0], [32])
    pools.prefill([0], [32], [end - 2], keep=True)
    pools.decode([0], [end - 2])
    y = pools.decode([0], [end - 1], as_slice=True)
    assert_close("decode", y, pools.expected([0], [end - 1], [end]), atol=0.05, rtol=0.05)
    _, states = pools.truths[0]
    for what, kept, at in (
        ("live state", pools.live[LIVE_SLOTS[0]], end),
        ("snapshot", pools.snapshots[SNAPSHOT_SLOT], SNAPSHOT_AT),
    ):
        wrong = [float((kept.cpu().double() - states[i - 1]).abs().max()) for i in (at - 1, at)]
        assert wrong[1] < 0.25 * wrong[0], f"{what}: nearer to that of the token before, {wrong}"


@pytest.mark.parametrize(("name", "backend"), BACKENDS)
def test_a_forgotten_initial_state_is_seen(name: str, backend: str) -> None:
    """Negative control: the second step begins with zeros."""
    pools = Pools(name, backend)
    pools.prefill([0], [0], [32])
    pools.live[LIVE_SLOTS[0]] = 0
    y = pools.prefill([0], [32], [70], keep=True)
    with pytest.raises(AssertionError):
        assert_close("second step", y, pools.expected([0], [32], [70]))
