"""KV-4: eviction order of blocks that no request uses."""

from __future__ import annotations

import pytest

from megatron_ext.prefix_cache.eviction import LeafFirstLru


def test_evictable_blocks_are_counted_listed_and_evicted_once():
    order = LeafFirstLru()
    order.hold([3, 1, 2])
    assert len(order) == 3
    assert list(order) == [3, 1, 2]
    assert all(block in order for block in (3, 1, 2))
    assert [*order.evict(1), *order.evict(2)] == [3, 1, 2]
    assert len(order) == 0


def test_reused_blocks_are_not_evicted():
    order = LeafFirstLru()
    order.hold([3, 1, 2])
    order.take_out([2, 1])
    assert list(order) == [3]
    order.check()
    order.take_out([3])
    order.check()
    order.hold([3])
    assert order.evict(1) == [3]


def test_blocks_go_in_the_order_in_which_they_were_left():
    order = LeafFirstLru()
    order.hold([5, 2, 9])
    order.take_out([5])
    order.hold([5])
    order.follow_moves({9: 7, 3: 4})
    assert order.evict(3) == [2, 7, 5]


def test_none_goes_that_was_left_after_a_time():
    order = LeafFirstLru(iter([4, 6, 8]))
    order.hold([1, 2, 3])
    assert order.next_priority() == 4
    assert order.evict(3, 4) == [1]
    assert order.next_priority() == 6, "what stays keeps its place"
    assert order.evict(3, 6) == [2]
    assert order.evict(3, 7) == []
    assert order.next_priority() == 8
    order.check()


def test_clear():
    order = LeafFirstLru()
    order.hold([1])
    order.clear()
    assert len(order) == 0
    assert order.next_priority() == float("inf")


def test_nothing_to_evict_is_a_mistake_of_ours():
    with pytest.raises(KeyError):
        LeafFirstLru().evict(1)


def test_no_block_is_left_twice():
    order = LeafFirstLru()
    order.hold([5, 2])
    with pytest.raises(AssertionError, match="twice"):
        order.hold([1, 2])
