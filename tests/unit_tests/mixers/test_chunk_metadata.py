"""HY-9, M1-2: where prefill is cut into kernel chunks, for Mamba-1 and Mamba-2 alike."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.mixers.recurrent import cut_between
from megatron_ext.ops.varlen import pack_chunks


def test_example_of_a_continuation() -> None:
    """M1-2: 1866 tokens done, 1100 more, a state wanted at 2048: 182 up to there, 918 follow."""
    chunks = pack_chunks([cut_between(1866, 1100, 2048, [2048])], "cpu")
    assert chunks.chunk_lengths == (182, 918)
    assert chunks.chunk_counts == (2,)
    assert chunks.cu_chunk_seqlens.tolist() == [0, 182, 1100]
    assert chunks.last_chunk_indices.tolist() == [1]


@pytest.mark.parametrize(
    ("start", "length", "stops", "pieces"),
    [
        (0, 1, [], [1]),
        (0, 64, [], [64]),
        (0, 65, [], [33, 32]),
        (0, 150, [], [50, 50, 50]),
        (0, 2176, [2176], [64] * 34),
        (7, 130, [], [44, 43, 43]),
        (0, 150, [64, 128], [64, 64, 22]),
        (100, 100, [128, 200], [28, 36, 36]),
    ],
)
def test_work_is_shared_evenly_between_wanted_states(start, length, stops, pieces) -> None:
    """HY-9: work is shared evenly, with chunks of at most 64 tokens."""
    assert cut_between(start, length, 64, stops) == pieces


@given(data=st.data(), start=st.integers(0, 300), length=st.integers(1, 300), chunk_size=st.integers(1, 70))
def test_wanted_states_are_ends_and_chunks_are_few(data, start: int, length: int, chunk_size: int) -> None:
    """HY-9: no chunk is too long, every wanted position is an end, and fewer chunks would not do."""
    stops = sorted(data.draw(st.sets(st.integers(start + 1, start + length), max_size=4)))
    pieces = cut_between(start, length, chunk_size, stops)
    ends = [start + sum(pieces[: i + 1]) for i in range(len(pieces))]
    assert ends[-1] == start + length
    assert {*stops} <= {*ends}
    assert 1 <= min(pieces) <= max(pieces) <= chunk_size
    borders = [start, *dict.fromkeys([*stops, start + length])]
    for begin, end in itertools.pairwise(borders):
        inside = [size for size, at in zip(pieces, ends, strict=True) if begin < at <= end]
        assert len(inside) == -(-(end - begin) // chunk_size)
        assert max(inside) - min(inside) <= 1
