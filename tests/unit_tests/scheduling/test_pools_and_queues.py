"""Live rows and queues: who misuses them hears of it."""

from __future__ import annotations

import pytest

from megatron_ext.scheduling.queue import Queues, RequestQueue
from megatron_ext.scheduling.rows import RowPool
from tests.unit_tests.scheduling.builders import make_request


class TestRowPool:
    def test_the_lowest_free_row_is_handed_out(self):
        rows = RowPool(3)
        assert [rows.take(), rows.take(), rows.take()] == [0, 1, 2]
        for row in (2, 0):
            rows.give_back(row)
        assert rows.free_count == 2
        assert [rows.take(), rows.take()] == [0, 2]
        rows.give_back(0)
        rows.give_back(1)
        assert rows.take() == 0

    def test_no_row_beyond_the_last(self):
        rows = RowPool(1)
        rows.take()
        with pytest.raises(AssertionError, match="no free row"):
            rows.take()

    def test_no_row_comes_back_twice(self):
        rows = RowPool(2)
        row = rows.take()
        rows.give_back(row)
        with pytest.raises(AssertionError, match="twice"):
            rows.give_back(row)

    def test_check_accepts_the_truth(self):
        rows = RowPool(3)
        rows.check([rows.take(), rows.take()])

    @pytest.mark.parametrize("owned", [[], [0], [0, 0], [0, 1, 2], [0, 3]])
    def test_check_finds_rows_lost_doubled_and_invented(self, owned: list[int]):
        rows = RowPool(3)
        rows.take()
        rows.take()
        with pytest.raises(AssertionError):
            rows.check(owned)


class TestQueues:
    def test_a_queue_is_in_order_of_arrival_however_it_was_filled(self):
        queue = RequestQueue()
        for arrival in (3, 0, 2, 1):
            queue.add(make_request(arrival, 1))
        assert [request.arrival for request in queue] == [0, 1, 2, 3]
        assert len(queue) == 4

    def test_a_queue_may_change_while_it_is_walked(self):
        queue = RequestQueue()
        for arrival in range(4):
            queue.add(make_request(arrival, 1))
        for request in queue:
            queue.remove(request)
        assert len(queue) == 0

    def test_nobody_queues_twice(self):
        queue = RequestQueue()
        request = make_request(0, 1)
        queue.add(request)
        with pytest.raises(AssertionError, match="here already"):
            queue.add(request)

    def test_moving(self):
        queues = Queues()
        request = make_request(0, 1)
        queues.waiting.add(request)
        queues.move(request, queues.running)
        assert request in queues.running
        assert request not in queues.waiting
        assert list(queues) == [request]
        assert len(queues) == 1
        queues.discard(request)
        assert len(queues) == 0

    def test_a_stranger_cannot_leave(self):
        with pytest.raises(AssertionError, match="no queue"):
            Queues().discard(make_request(0, 1))
