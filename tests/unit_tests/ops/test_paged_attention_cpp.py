"""Guarantees of the C++ backend beyond the contract: equal bits however a sequence is split and batched."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from megatron_ext.memory.activations import thread_sums
from megatron_ext.ops import cpp
from megatron_ext.ops.paged_attention import PAGED_ATTENTION, build_paged_batch, paged_attention
from tests.unit_tests.ops.backends import usable
from tests.unit_tests.ops.oracles import assert_close, attention
from tests.unit_tests.ops.test_paged_attention import SCALE, Step

pytestmark = pytest.mark.skipif("cpp" not in usable(PAGED_ATTENTION), reason="no compiler here, or a GPU")
HEADS, KEY_HEADS = 6, 2


@pytest.fixture(autouse=True)
def backend() -> Iterator[None]:
    with PAGED_ATTENTION.forced("cpp"):
        yield


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def sequence_of(
    length: int,
    block: int = 16,
    head_size: int = 24,
    dtype: torch.dtype = torch.float32,
    heads: tuple[int, int] = (HEADS, KEY_HEADS),
) -> Step:
    """A step that computes one sequence at once."""
    return Step([(length, length)], 0, *heads, head_size, dtype, block)


def attend(sequence: Step, *cuts: tuple[int, int]) -> Tensor:
    """Queries [begin, end) of each cut, as sequences of one step; one query alone decodes."""
    cuts = tuple(sorted(cuts, key=lambda cut: cut[1] - cut[0] != 1))  # decodes come first
    parts = copy.copy(sequence)
    parts.rows, parts.tables = [(end - begin, end) for begin, end in cuts], sequence.tables * len(cuts)
    parts.decode_rows = sum(queries == 1 for queries, _ in parts.rows)
    return parts.attend(torch.cat([sequence.q[begin:end] for begin, end in cuts]))


KINDS = {
    "fp32": {},
    "odd head": {"head_size": 37},
    "bf16": {"dtype": torch.bfloat16},
    "fp16, odd head": {"dtype": torch.float16, "head_size": 37},
    "head of 32": {"head_size": 32},
    "bf16, head of 64": {"dtype": torch.bfloat16, "head_size": 64},
    "head of 128": {"head_size": 128},
    "fp16, head of 256": {"dtype": torch.float16, "head_size": 256},
    "head of 5": {"head_size": 5},
    "blocks of 7": {"block": 7},
    "blocks of 256": {"block": 256},
    "one key head": {"heads": (12, 1)},
    "one query head a key head": {"heads": (3, 3)},
    "8 query heads a key head": {"heads": (16, 2), "head_size": 32},
    "40 query heads a key head": {"heads": (40, 1)},
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits_however_a_sequence_is_cut(kind: str) -> None:
    """EX-14: a query's result with the cache on (a short chunk after a prefix), off (all at once), and in decode."""
    sequence = sequence_of(300, **KINDS[kind])
    whole = attend(sequence, (0, 300))
    for begin, end in ((0, 1), (0, 130), (17, 18), (63, 66), (128, 300), (299, 300), (255, 257)):
        assert torch.equal(attend(sequence, (begin, end)), whole[begin:end]), (begin, end)


def test_the_same_bits_beside_whatever() -> None:
    """EX-14: other sequences of the step, and other chunks of the same one."""
    sequence = sequence_of(300)
    alone = attend(sequence, (200, 300))
    beside = attend(sequence, (50, 51), (299, 300), (200, 300), (0, 77))
    assert torch.equal(beside[2:102], alone)
    assert torch.equal(beside[:1], attend(sequence, (50, 51)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("cuts", [[(4999, 5000)], [(4990, 5000)], [(4999, 5000), (0, 1), (4000, 4100)]], ids=str)
def test_the_same_bits_with_any_number_of_threads(cuts: list[tuple[int, int]], dtype: torch.dtype) -> None:
    """EX-14: threads beyond the number of rows share the keys of one sequence."""
    sequence = sequence_of(5000, head_size=16, dtype=dtype)
    torch.set_num_threads(1)
    one = attend(sequence, *cuts)
    for threads in (2, 3, 8):
        torch.set_num_threads(threads)
        assert torch.equal(attend(sequence, *cuts), one), threads


@pytest.mark.parametrize("cuts", [[(35_999, 36_000), (22_000, 22_001)], [(35_900, 35_920)]], ids=str)
def test_the_same_bits_in_several_waves_of_spans(cuts: list[tuple[int, int]]) -> None:
    """EX-14: one thread computes 16 spans at a time, here of 18 and of 11 of a sequence; eight compute all at once."""
    sequence = sequence_of(36_000, block=64, head_size=8, heads=(3, 1))
    torch.set_num_threads(8)
    once = attend(sequence, *cuts)
    torch.set_num_threads(1)
    assert torch.equal(attend(sequence, *cuts), once)
    keys, values = (cache[sequence.tables[0]].flatten(0, 1) for cache in (sequence.key_cache, sequence.value_cache))
    want = [attention(sequence.q[i:j], keys[:j], values[:j], SCALE) for i, j in cuts]
    assert_close("waves", once, torch.cat(want))


@pytest.mark.parametrize("count", [3, 8])
@pytest.mark.parametrize("tokens", [1, 20])
def test_memory_depends_neither_on_keys_nor_on_requests(count: int, tokens: int) -> None:
    """EX-6: partial sums of 512 spans, of few rows and of many, take what the plan counts for the threads."""
    torch.set_num_threads(count)
    length, heads, head_size = 262_144, 2, 64
    cache = torch.zeros(2, 1024, heads, head_size)
    batch = build_paged_batch([[1] * (length // 1024)] * 2, [tokens] * 2, [length] * 2, 2 * (tokens == 1), 1024, "cpu")
    q = torch.zeros(2 * tokens, heads, head_size)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        paged_attention(q, cache, cache, batch, scale=0.3)
    events = profile.profiler.kineto_results.events()
    peak = max(itertools.accumulate(event.nbytes() for event in events if event.name() == "[memory]"))
    assert q.nbytes < peak <= q.nbytes + count * thread_sums(head_size)


@pytest.mark.parametrize("head_size", [5, 64, 100, 128, 256])
def test_memory_of_a_thread_is_what_the_plan_counts(head_size: int) -> None:
    """EX-6: counted for the widest vectors."""
    counted = thread_sums(head_size)
    assert counted / 16 <= 4 * cpp.kernels().attention_floats_of_a_thread(head_size) <= counted


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_nan_does_not_spread_to_other_queries(poison: float) -> None:
    """Queries are lanes of one vector; keys to come are not read by earlier queries, and weigh nothing if they are."""
    sequence = sequence_of(200)
    whole = attend(sequence, (0, 200))
    sequence.q[100, 3] = poison
    got = attend(sequence, (0, 200))
    assert not bool(got[100, 3].isfinite().any())
    got[100, 3] = whole[100, 3]
    assert torch.equal(got, whole)


def test_a_block_that_is_not_there_is_refused() -> None:
    """A wrong table is an error, never a read of foreign memory."""
    sequence = sequence_of(40)
    for block in (-1, 10**6, len(sequence.key_cache)):
        sequence.tables[0][1] = block
        with pytest.raises(IndexError, match=f"block {block} of"):
            attend(sequence, (0, 40))


def test_a_table_that_is_too_short_is_refused() -> None:
    """A table must have every block that the keys fill: memory after the table is not read."""
    sequence = sequence_of(40)
    batch = sequence.batch()
    short = dataclasses.replace(batch, block_table=batch.block_table[:, :-1].contiguous())
    with pytest.raises(IndexError, match="3 blocks of a table of 2"):
        paged_attention(sequence.q, sequence.key_cache, sequence.value_cache, short, scale=SCALE)
