"""Bound of the stale entries of a queue whose items move and leave."""

from __future__ import annotations

from megatron_ext.prefix_cache.aged_queue import AgedQueue


def build_queue() -> AgedQueue[int]:
    """Queue of 500 items with two entries each."""
    queue: AgedQueue[int] = AgedQueue()
    for key in (1.0, 2.0):
        for item in range(500):
            queue.put(item, key)
    queue.check()
    return queue


def test_few_stale_entries_stay_when_items_are_discarded():
    queue = build_queue()
    for item in range(450):
        queue.discard(item)
        queue.check()
    assert [queue.pop()[0] for _ in range(50)] == list(range(450, 500))
