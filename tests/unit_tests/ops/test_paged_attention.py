"""Paged attention against causal attention of each row alone, query by query in fp64.

Caches are filled with NaN except where a row has written: reading anything else is loud.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from megatron_ext.mcore import platform
from megatron_ext.ops.paged_attention import PAGED_ATTENTION, PagedBatch, build_paged_batch, paged_attention, reference
from tests.unit_tests.ops.backends import marks, usable
from tests.unit_tests.ops.oracles import assert_close, attention

BLOCK = 16
SCALE = 0.35


@pytest.fixture(autouse=True, params=[pytest.param(name, marks=marks(name)) for name in usable(PAGED_ATTENTION)])
def backend(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every backend keeps the whole contract."""
    with PAGED_ATTENTION.forced(request.param):
        yield


@dataclass
class Step:
    """Rows (queries, keys) of one step, the decode rows first, over a poisoned pool with shuffled blocks."""

    rows: list[tuple[int, int]]
    decode_rows: int
    query_heads: int = 4
    kv_heads: int = 2
    head_size: int = 16
    dtype: torch.dtype = torch.float32
    block: int = BLOCK

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        counts = [-(-keys // self.block) for _, keys in self.rows]
        order = (torch.randperm(sum(counts), generator=generator) + 1).tolist()  # block 0 is unused
        self.tables = [[order.pop() for _ in range(count)] for count in counts]
        shape = (sum(counts) + 2, self.block, self.kv_heads, self.head_size)
        self.key_cache, self.value_cache = (torch.full(shape, float("nan"), dtype=self.dtype) for _ in range(2))
        for table, (_, keys) in zip(self.tables, self.rows, strict=True):
            places = (
                torch.tensor(table).repeat_interleave(self.block)[:keys] * self.block + torch.arange(keys) % self.block
            )
            drawn = torch.randn(keys, 2, *shape[2:], generator=generator).to(self.dtype)
            for cache, own in zip((self.key_cache, self.value_cache), drawn.unbind(1), strict=True):
                cache.flatten(0, 1)[places] = own
        tokens = sum(queries for queries, _ in self.rows)
        self.q = torch.randn(tokens, self.query_heads, self.head_size, generator=generator).to(self.dtype)

    def batch(self, decode_rows: int | None = None) -> PagedBatch:
        """Batch whose first rows decode, each with one query or more."""
        queries, keys = zip(*self.rows, strict=True)
        batch = build_paged_batch(self.tables, queries, keys, 0, self.block, "cpu")
        return replace(batch, num_decode=self.decode_rows if decode_rows is None else decode_rows)

    def attend(
        self,
        q: Tensor | None = None,
        decode_rows: int | None = None,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        caches, q = (self.key_cache, self.value_cache), self.q if q is None else q
        return paged_attention(q, *caches, self.batch(decode_rows), scale=SCALE, window=window, sinks=sinks)

    def between(self, gap: int) -> Step:
        """Return this step over one arena in which `gap` elements of NaN follow each block's keys and its values."""
        blocks, *block = self.key_cache.shape
        parts = torch.full((blocks, 2, math.prod(block) + gap), math.nan, dtype=self.q.dtype, device=platform.device())
        apart = parts[..., : math.prod(block)].unflatten(-1, block)
        for cache, own in zip(apart.unbind(1), (self.key_cache, self.value_cache), strict=True):
            cache.copy_(own)
        spread = copy.copy(self)
        spread.key_cache, spread.value_cache = apart.unbind(1)
        return spread

    def expected(self, window: int | None = None, sinks: Tensor | None = None) -> Tensor:
        """The formula in fp64: a query sees its last keys; a sink is a further score, and has no value."""
        parts = []
        queries = self.q.split([queries for queries, _ in self.rows])
        for own, table, (_, length) in zip(queries, self.tables, self.rows, strict=True):
            keys, values = (cache[table].cpu().flatten(0, 1)[:length] for cache in (self.key_cache, self.value_cache))
            parts.append(attention(own, keys, values, SCALE, window, sinks))
        return torch.cat(parts)


MIXED = [(1, 1), (1, 16), (1, 17), (1, 100), (5, 5), (1, 1), (1, 40), (16, 16), (3, 50), (63, 65), (65, 65)]

STEPS = {
    "one decode row": Step([(1, 37)], 1),
    "decode rows of one length": Step([(1, 33)] * 3, 3),
    "decode rows of all lengths": Step([(1, keys) for keys in (1, 2, 15, 16, 17, 200)], 6),
    "one fresh prefill": Step([(65, 65)], 0),
    "one continuation": Step([(20, 65)], 0),
    "one token behind a prefix": Step([(1, 65)], 0),
    "first token of all": Step([(1, 1)], 0),
    "decode and prefill": Step(MIXED, 4),
    "no decode rows": Step(MIXED[4:], 0),
    "one query head a key head": Step(MIXED, 4, query_heads=3, kv_heads=3),
    "one key head": Step(MIXED, 4, query_heads=6, kv_heads=1),
    "odd head size": Step(MIXED, 4, head_size=5),
    "large head size": Step(MIXED, 4, head_size=80),
    "head size of a vector and a bit": Step(MIXED, 4, head_size=33),
    "many query heads a key head": Step(MIXED, 4, query_heads=71, kv_heads=1),
    "seven query heads a key head": Step(MIXED, 4, query_heads=14, kv_heads=2, head_size=64),
    "long": Step([(1, 500), (64, 500), (500, 500)], 1),
}


@pytest.mark.parametrize("name", STEPS)
def test_equals_each_row_alone(name: str) -> None:
    """HY-7 (attention's part): decode, fresh, restored and continuing rows in one call; no poison is read."""
    step = STEPS[name]
    assert_close(name, step.attend(), step.expected())


SINKS = ["decode and prefill", "decode rows of all lengths", "one query head a key head", "odd head size", "long"]


@pytest.mark.parametrize("window", [None, 7, 40])
@pytest.mark.parametrize("name", SINKS)
def test_sinks(name: str, window: int | None) -> None:
    """FA-4: sinks above and below all scores, in every backend, with a window and without."""
    step = STEPS[name]
    sinks = torch.linspace(-4, 6, step.query_heads)
    assert_close(name, step.attend(window=window, sinks=sinks), step.expected(window, sinks))


@pytest.mark.parametrize("window", [1, 15, 16, 17, 40])
@pytest.mark.parametrize("name", ["decode and prefill", "decode rows of all lengths", "one continuation"])
def test_windows(name: str, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """FA-4: the last keys of each query, by the reference in tiles of a few queries; a long window changes no bit."""
    monkeypatch.setattr(reference, "_SMALLEST_TILE", 6)
    step = STEPS[name]
    assert_close(name, step.attend(window=window), step.expected(window))
    assert torch.equal(step.attend(window=300), step.attend())
    with pytest.raises(AssertionError):
        assert_close(name, step.attend(window=window + 1), step.expected(window))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_size", [8, 16, 33])
def test_16_bits(dtype: torch.dtype, head_size: int) -> None:
    step = Step(MIXED, 4, dtype=dtype, head_size=head_size)
    got = step.attend()
    assert got.dtype == dtype
    assert_close("16 bits", got, step.expected(), atol=0.02, rtol=0.02)


@pytest.mark.parametrize(
    "rows", [[(1, 4500)], [(1, 2048), (1, 2049), (3, 5000)], [(70, 4200)], [(1, 4096)], [(2, 4097)]], ids=str
)
def test_more_keys_than_a_span(rows: list[tuple[int, int]]) -> None:
    """Sums over spans give one softmax, even if the last key ends a span or is alone in one."""
    step = Step(rows, sum(queries == 1 for queries, _ in rows))
    assert_close("long", step.attend(), step.expected())


@pytest.mark.parametrize("queries", [1, 40])
def test_great_scores_in_a_later_span(queries: int) -> None:
    """The greatest score is that of all keys: those of a later span may be beyond what fp32 can weigh the first by."""
    step = Step([(queries, 2200)], int(queries == 1))
    step.q = step.q * 60
    for block in step.tables[0][2048 // BLOCK :]:
        step.key_cache[block] *= 5
    assert_close("great", step.attend(), step.expected())


def test_queries_may_be_part_of_a_wider_tensor() -> None:
    """Queries, keys and values come out of one product."""
    step = STEPS["decode and prefill"]
    wide = torch.full((len(step.q), 9, step.head_size), float("nan"))
    wide[:, 2:6] = step.q
    assert torch.equal(step.attend(wide[:, 2:6]), step.attend())


@pytest.mark.parametrize("name", ["one decode row", "one fresh prefill", "decode and prefill"])
@pytest.mark.parametrize("padding", [1, 7, 64])
def test_padding_is_not_read(name: str, padding: int) -> None:
    """HY-10: queries after the rows do not matter, bitwise, and come out as zeros."""
    step = STEPS[name]
    plain = step.attend()
    got = step.attend(torch.cat([step.q, step.q.new_full((padding, *step.q.shape[1:]), float("nan"))]))
    assert torch.equal(got[: len(plain)], plain)
    assert torch.equal(got[len(plain) :], torch.zeros_like(got[len(plain) :]))


def test_no_rows_at_all() -> None:
    """A step whose tokens are all padding."""
    step = STEPS["one decode row"]
    batch = build_paged_batch([], [], [], 0, BLOCK, "cpu")
    out = paged_attention(step.q, step.key_cache, step.value_cache, batch, scale=SCALE)
    assert torch.equal(out, torch.zeros_like(step.q))


def test_blocks_may_be_shared_and_tables_longer_than_needed() -> None:
    """KV-3: two rows over one prefix; a table may already hold blocks for later tokens."""
    step = Step([(1, 37), (4, 37)], 1)
    step.tables[1] = step.tables[0]
    want = step.expected()
    step.tables = [[*table, 0, 1] for table in step.tables]
    assert_close("shared", step.attend(), want)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize(
    ("name", "gap"),
    [*(("decode and prefill", gap) for gap in (0, 64, 208)), ("odd head size", 160), ("odd head size", 3)],
)
def test_blocks_may_lie_apart(name: str, gap: int, window: int | None) -> None:
    """KV-3: keys, values and other layers share an arena; equal to the bit wherever blocks begin."""
    step, sinks = STEPS[name], torch.linspace(-4, 6, STEPS[name].query_heads)
    found, expected = (one.attend(window=window, sinks=sinks) for one in (step.between(gap), step))
    assert torch.equal(found, expected)


def test_blocks_beyond_two_billion_elements() -> None:
    """An arena may be larger than 32-bit offsets reach; only pages that hold a block are touched."""
    step = Step([(1, 37), (20, 40)], 1, dtype=torch.float16)
    stride, shape = 2**31 // 5, step.key_cache.shape
    arena = torch.empty((len(step.key_cache) - 1) * stride + 2**20, dtype=step.q.dtype, device=platform.device())
    block = step.key_cache[0].stride()
    caches = [arena.as_strided(shape, (stride // 16 * 16, *block), first) for first in (0, 2**16)]
    spread = copy.copy(step)
    spread.key_cache, spread.value_cache = (
        cache.copy_(own) for cache, own in zip(caches, (step.key_cache, step.value_cache), strict=True)
    )
    assert max(max(table) for table in step.tables) * caches[0].stride(0) > 2**31
    assert torch.equal(spread.attend(), step.attend())


def test_nothing_is_read_back() -> None:
    """Tensors without data: an operator that asked one for a value, or left one on the host, would fail."""
    step = STEPS["decode and prefill"]
    queries, keys = zip(*step.rows, strict=True)
    batch = build_paged_batch(step.tables, queries, keys, step.decode_rows, BLOCK, "meta")
    q, key_cache, value_cache = (tensor.to("meta") for tensor in (step.q, step.key_cache, step.value_cache))
    with PAGED_ATTENTION.forced("reference"):  # the one of devices
        assert paged_attention(q, key_cache, value_cache, batch, scale=SCALE).shape == q.shape


class TestTheComparisonCanFail:
    """Negative controls: swapped blocks, a wrong length, a key too many, another row's table."""

    def fails(self, step: Step, want: Tensor) -> None:
        with pytest.raises(AssertionError):
            assert_close("changed", step.attend(), want)

    @pytest.mark.parametrize("row", [(1, 37), (20, 37), (37, 37)])
    def test_swapped_blocks(self, row: tuple[int, int]) -> None:
        step = Step([row], int(row[0] == 1))
        want = step.expected()
        step.tables[0][1:] = reversed(step.tables[0][1:])
        self.fails(step, want)
