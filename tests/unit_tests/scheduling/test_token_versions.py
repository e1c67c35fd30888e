"""RL-2: versions of tokens, run-length coded, beside a list with an entry for each token."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.scheduling.token_versions import Runs, TokenVersions, joined, part_of

# A chunk: whether the request begins anew before it, how much the version rises before it, tokens that it yields.
CHUNKS = st.lists(st.tuples(st.booleans(), st.integers(0, 2), st.integers(0, 3)), min_size=1, max_size=12)


def coded(versions: list[int]) -> Runs:
    return tuple((version, len(list(run))) for version, run in itertools.groupby(versions))


@given(CHUNKS, st.data())
def test_equal_to_a_list(chunks: list[tuple[bool, int, int]], data: st.DataObject):
    tracked, own, prefix, version, admitted = TokenVersions(), [], [], 0, 0
    for begins, rise, count in chunks:
        version += rise
        if begins or not own:
            admitted = version
            tracked.admit(version)
        tracked.compute(len(own), version)
        own += [version] * count
        prefix += [admitted] * count
    start, end = sorted(data.draw(st.tuples(st.integers(0, len(own)), st.integers(0, len(own)))))
    if start < end:
        assert tracked.runs(start, end) == (coded(own[start:end]), coded(prefix[start:end]))
    else:
        assert tracked.runs(start, end) == (((version, 0),), ((admitted, 0),))
    whole = coded(own)
    assert part_of(whole, start, end) == coded(own[start:end])
    assert joined(part_of(whole, 0, start), part_of(whole, start, len(own))) == whole


def test_nothing_is_known_before_the_first_chunk():
    assert TokenVersions().runs(0, 0) == ((), ())


def test_a_continued_output_keeps_the_versions_of_its_tokens():
    """RL-11: tokens that an earlier request has generated, and what they rest on."""
    tracked = TokenVersions()
    tracked.restore(((1, 2), (3, 1)), ((1, 3),))
    tracked.admit(5)
    tracked.compute(3, 5)
    assert tracked.runs(0, 5) == (((1, 2), (3, 1), (5, 2)), ((1, 3), (5, 2)))
