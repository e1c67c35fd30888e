"""KV-4: eviction order of blocks that no request uses."""

from __future__ import annotations

from itertools import count

import pytest

from megatron_ext.prefix_cache.eviction import LeafFirstLru


def test_blocks_go_in_the_order_in_which_they_were_left():
    order = LeafFirstLru(count())
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


def test_no_block_is_left_twice():
    order = LeafFirstLru(count())
    order.hold([5, 2])
    with pytest.raises(AssertionError, match="twice"):
        order.hold([1, 2])
