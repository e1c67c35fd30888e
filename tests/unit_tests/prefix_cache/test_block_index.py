"""KV-2: the forest of block hashes."""

from __future__ import annotations

import pytest

from megatron_ext.prefix_cache.block_index import BlockIndex

A, B, C, X = b"a", b"b", b"c", b"x"


@pytest.fixture
def chain():
    """A <- B <- C in blocks 0, 1, 2."""
    index = BlockIndex()
    index.add([A], [0], None)
    index.add([B, C], [1, 2], A)
    return index


def test_longest_run_stops_at_the_first_miss(chain):
    """KV-2: a hole gives a shorter match, never an exception."""
    assert chain.longest_run([A, B, C]) == [0, 1, 2]
    assert chain.longest_run([A, X, C]) == [0]
    assert chain.longest_run([X, B, C]) == []
    assert chain.longest_run([]) == []


def test_parts_of_a_run_are_those_of_a_list(chain):
    """Parts equal those of a list for a run that ends before the block hashes do."""
    run, blocks = chain.longest_run([A, B, X]), [0, 1]
    parts = [slice(None), slice(1, None), slice(2, None), slice(-1, None), slice(0, 9), slice(None, None, -1)]
    assert [run[part] for part in parts] == [blocks[part] for part in parts]
    assert (run[1], run[-2]) == (1, 0)
    with pytest.raises(IndexError):
        run[2]


def test_a_parent_cannot_go_before_its_child(chain):
    with pytest.raises(AssertionError, match="cached children"):
        chain.remove([1])


def test_the_hottest_prefixes(chain):
    """Prefixes with most hits come first, then the longest; prefixes without hits are left out."""
    chain.add([X], [3], A)
    for block in (1, 1, 2, 2, 3):
        chain.count_hit(block)
    assert [(one.block_hash, one.blocks, one.hits) for one in chain.hottest(5)] == [(C, 3, 2), (B, 2, 2), (X, 2, 1)]
    assert [one.block_hash for one in chain.hottest(1)] == [C]
    chain.remove([3])
    assert len(chain.hottest(5)) == 2


@pytest.mark.parametrize("damage", ["orphan", "miscounted", "two blocks", "known in part", "hits without a user"])
def test_check_finds(chain, damage):
    """Negative controls of the index's own check."""
    if damage == "orphan":
        chain._parents[C] = X
    elif damage == "miscounted":
        chain._children[A] = 2
    elif damage == "known in part":
        del chain._parents[C], chain._children[B]
    elif damage == "hits without a user":
        chain._hits[X] = 1
    else:
        chain._blocks[C] = 0
    with pytest.raises(AssertionError):
        chain.check()
