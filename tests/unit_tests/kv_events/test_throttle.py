"""Log lines that a peer can cause are limited."""

from __future__ import annotations

from megatron_ext.kv_events.channel import INTERVAL, Throttle


def test_a_line_covers_all_occurrences_since_the_last_one():
    now = 100.0
    throttle = Throttle(lambda: now)
    assert [throttle.admit() for _ in range(3)] == [1, 0, 0]
    now += INTERVAL
    assert [throttle.admit() for _ in range(3)] == [3, 0, 0]
