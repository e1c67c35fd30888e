"""Copies of states, bit for bit, over every backend; whatever else is in the pools stays what it is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from megatron_ext.mcore import platform
from megatron_ext.ops import triton
from megatron_ext.ops.state_copy import STATE_COPY, copy_rows
from megatron_ext.ops.triton.kernel_registry import watch
from tests.unit_tests.ops.backends import params

COVERED = ("copy_states",)
DEVICE = platform.device()
LAYERS, SLOTS, TARGETS = 3, 6, 5
TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.fixture(autouse=True, params=params(STATE_COPY))
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every backend keeps the whole contract."""
    with STATE_COPY.forced(request.param):
        yield request.param


def in_records(pool: Tensor, gap: int) -> Tensor:
    """Return an equal pool whose rows have all layers together, `gap` elements apart, as snapshots in an arena."""
    layers, rows = pool.shape[:2]
    inner = pool[0].numel() // rows if rows else 0
    memory = torch.empty(max(0, rows - 1) * gap + pool.numel() + 1, dtype=pool.dtype, device=pool.device)
    return memory.as_strided(pool.shape, (inner, layers * inner + gap, *pool.stride()[2:])).copy_(pool)


class Pools:
    """Sources with numbers and NaN, targets with other ones.

    `in_arena` says whether sources and targets are records in an arena, `gap` how many elements apart.
    """

    def __init__(
        self,
        conv: torch.dtype,
        state: torch.dtype,
        shape: tuple[int, ...] = (4, 10, 60),
        in_arena: tuple[bool, bool] = (False, False),
        gap: int = 32,
    ) -> None:
        generator = torch.Generator().manual_seed(2)

        def pool(slots: int, of: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            numbers = torch.randn(LAYERS, slots, *of, generator=generator)
            return numbers.where(numbers > -2, torch.nan).to(dtype).to(DEVICE)

        self.pairs = [
            (pool(SLOTS, of, dtype), pool(TARGETS, of, dtype)) for of, dtype in (((7, 3), conv), (shape, state))
        ]
        self.pairs = [
            tuple(in_records(one, gap) if is_in else one for one, is_in in zip(pair, in_arena, strict=True))
            for pair in self.pairs
        ]

    def copy(self, rows: list[int], targets: list[int]) -> None:
        copy_rows(*self.pairs, *(torch.tensor(index, dtype=torch.int64, device=DEVICE) for index in (rows, targets)))

    def expected(self, rows: list[int], targets: list[int]) -> list[Tensor]:
        wanted = [target.contiguous().clone() for _, target in self.pairs]
        for (source, _), target in zip(self.pairs, wanted, strict=True):
            for row, other in zip(rows, targets, strict=True):
                if row >= 0 and other >= 0:
                    target[:, other] = source[:, row]
        return wanted


def bits(t: Tensor) -> Tensor:
    return t.contiguous().view(torch.uint8)


@pytest.mark.parametrize("state", TYPES, ids=str)
@pytest.mark.parametrize("conv", TYPES, ids=str)
def test_rows_of_all_layers_are_copied_and_nothing_else(conv: torch.dtype, state: torch.dtype) -> None:
    """CU-1, CU-2: any types, padding at either side and in the middle, NaN kept as it is."""
    rows, targets = [4, -1, 0, 2, 5], [1, 0, -1, 3, 4]
    pools = Pools(conv, state)
    wanted, sources = pools.expected(rows, targets), [source.clone() for source, _ in pools.pairs]
    pools.copy(rows, targets)
    for (source, target), want, before in zip(pools.pairs, wanted, sources, strict=True):
        assert torch.equal(bits(target), bits(want))
        assert torch.equal(bits(source), bits(before))


@pytest.mark.parametrize("rows", [[4, -1, 0, 2, 5], [-1, -1, -1, -1, -1]], ids=str)
def test_fixed_shapes_of_the_reference(rows: list[int]) -> None:
    """CU-2: on a device the reference reads no row number back, in pools of any layout."""
    pools, targets = Pools(torch.bfloat16, torch.float32, in_arena=(False, True)), [1, 0, -1, 3, 4]
    wanted = pools.expected(rows, targets)
    with STATE_COPY.forced("reference"):
        copy_rows(*pools.pairs, torch.tensor(rows).to(DEVICE), torch.tensor(targets).to(DEVICE))
    assert all(torch.equal(bits(target), bits(want)) for (_, target), want in zip(pools.pairs, wanted, strict=True))


@pytest.mark.parametrize("in_arena", [(True, False), (False, True), (True, True)], ids=["from", "to", "within"])
def test_records_of_an_arena(in_arena: tuple[bool, bool], backend: str) -> None:
    """CU-1: restores and snapshots, by the same kernel; what lies between records stays what it is."""
    rows, targets = [4, -1, 0, 2, 5], [1, 0, -1, 3, 4]
    pools = Pools(torch.bfloat16, torch.float32, in_arena=in_arena)
    wanted, sources = pools.expected(rows, targets), [source.contiguous() for source, _ in pools.pairs]
    with watch() as launches:
        pools.copy(rows, targets)
    for (source, target), want, before in zip(pools.pairs, wanted, sources, strict=True):
        assert torch.equal(bits(target), bits(want))
        assert torch.equal(bits(source), bits(before))
    assert [launch.kernel for launch in launches] == ["copy_states"] * (backend == triton.NAME)


def test_records_beyond_two_billion_elements() -> None:
    """An arena may be larger than 32-bit offsets reach; only the pages of its records are touched."""
    rows, targets = [4, 0, 5], [1, 0, 4]
    pools = Pools(torch.float16, torch.float16, in_arena=(True, True), gap=2**31 // 4 + 16)
    wanted = pools.expected(rows, targets)
    pools.copy(rows, targets)
    assert all(torch.equal(bits(target), bits(want)) for (_, target), want in zip(pools.pairs, wanted, strict=True))


def test_one_launch_copies_all(backend: str) -> None:
    """CU-1: one launch copies both kinds and all layers, as compiled ahead of time."""
    pools = Pools(torch.bfloat16, torch.float32)
    with watch() as launches:
        pools.copy([1, 2], [0, 1])
    assert [launch.kernel for launch in launches] == ["copy_states"] * (backend == triton.NAME)


def test_pools_in_pieces_are_copied_by_the_reference(backend: str) -> None:
    """CU-3: the reference copies pools for which there is no kernel."""
    pools = Pools(torch.float32, torch.float32)
    pools.pairs = [(source.transpose(-1, -2), target.transpose(-1, -2)) for source, target in pools.pairs]
    wanted = pools.expected([3], [2])
    pools.copy([3], [2])
    assert all(torch.equal(bits(target), bits(want)) for (_, target), want in zip(pools.pairs, wanted, strict=True))
