"""Positions in a sequence where states are worth keeping, in literal numbers: blocks of 4 tokens."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import pytest
from hypothesis import given

from megatron_ext.prefix_cache.hash_chain import hash_blocks, root_hash
from megatron_ext.scheduling.snapshots.snapshot_positions import (
    common_blocks,
    cut_aligned,
    max_snapshots,
    prefill_positions,
)

BLOCK = 4


@pytest.mark.parametrize(
    ("start", "end", "length", "shared_end", "expected"),
    [
        (0, 15, 15, 0, [12]),  # the last boundary below the end
        (0, 16, 16, 0, [12, 16]),  # and the end, which is one
        (0, 17, 17, 8, [8, 16]),  # where the matched run ends
        (8, 17, 17, 8, [16]),  # it resumed there
        (4, 17, 17, 8, [8, 16]),  # it resumed before that
        (0, 8, 17, 0, []),  # a first chunk
        (8, 16, 17, 0, [16]),  # FX-2: the chunk that reaches the boundary
        (16, 17, 17, 0, []),  # and the one after it
        (0, 3, 3, 0, []),  # less than a block
        (0, 4, 4, 0, [4]),  # a block: no boundary below its end but 0
        (0, 16, 16, 16, [16, 12]),  # matched to its end, and nothing to resume from
    ],
)
def test_positions(start: int, end: int, length: int, shared_end: int, expected: list[int]):
    """HY-4, FX-2."""
    assert prefill_positions(start, end, length, shared_end, BLOCK) == expected


@given(st.integers(1, 80), st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(0, 9))
def test_aligned_chunks_reach_the_end_over_every_wanted_boundary(length: int, budgets: list[int], shared: int):
    """LA-1: every token helps, every stop is the end of a chunk, and a chunk that reaches a boundary ends on one."""
    shared_end = min(shared, length // BLOCK) * BLOCK
    stops = [shared_end, (length - 1) // BLOCK * BLOCK]
    ends, start = [], 0
    for budget in itertools.cycle(budgets):
        if start == length:
            break
        end = cut_aligned(start, min(length, start + budget), length, stops, BLOCK)
        assert start < end <= start + budget
        assert end in (length, end // BLOCK * BLOCK) or end // BLOCK == start // BLOCK
        ends.append(end)
        start = end
    assert {stop for stop in stops if stop > 0} <= set(ends)


@given(st.lists(st.integers(0, 1), max_size=40), st.lists(st.integers(0, 1), max_size=40))
def test_common_blocks(one: list[int], other: list[int]):
    """KV-6: the point where two sequences part, in whole blocks."""
    root = root_hash([b"model"])
    block_hashes = [hash_blocks(root, tokens[: len(tokens) // BLOCK * BLOCK], BLOCK) for tokens in (one, other)]
    expected = 0
    while (expected + 1) * BLOCK <= min(len(one), len(other)) and (
        one[: (expected + 1) * BLOCK] == other[: (expected + 1) * BLOCK]
    ):
        expected += 1
    assert common_blocks(*block_hashes) == expected


@given(st.integers(1, 90), st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(0, 9), st.booleans())
def test_no_prompt_leaves_more_than_the_estimate(length: int, budgets: list[int], shared: int, is_aligned: bool):
    """LA-4: the estimate is without followers; one more snapshot is kept in decode."""
    shared_end, start, left = min(shared, length // BLOCK) * BLOCK, 0, set()
    for budget in itertools.cycle(budgets):
        if start == length:
            break
        end = min(length, start + budget)
        if is_aligned:
            end = cut_aligned(start, end, length, [shared_end, (length - 1) // BLOCK * BLOCK], BLOCK)
            left |= {end} if end % BLOCK == 0 else set()
        else:
            left |= set(prefill_positions(start, end, length, shared_end, BLOCK))
        start = end
    assert len(left) + 1 <= max_snapshots(length, BLOCK, is_aligned=is_aligned)
