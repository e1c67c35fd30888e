"""Running state slots and queues: misuse raises an error."""

from __future__ import annotations

import pytest

from megatron_ext.scheduling.queue import Queues, RequestQueue
from megatron_ext.scheduling.running_slots import RunningSlots
from tests.unit_tests.scheduling.builders import make_request


class TestLiveSlots:
    def test_the_lowest_free_slot_is_handed_out(self):
        slots = RunningSlots(3)
        assert [slots.take(), slots.take(), slots.take()] == [0, 1, 2]
        for slot in (2, 0):
            slots.give_back(slot)
        assert slots.free_count == 2
        assert [slots.take(), slots.take()] == [0, 2]
        slots.give_back(0)
        slots.give_back(1)
        assert slots.take() == 0

    def test_no_slot_beyond_the_last(self):
        slots = RunningSlots(1)
        slots.take()
        with pytest.raises(AssertionError, match="no free slot"):
            slots.take()

    def test_no_slot_comes_back_twice(self):
        slots = RunningSlots(2)
        slot = slots.take()
        slots.give_back(slot)
        with pytest.raises(AssertionError, match="twice"):
            slots.give_back(slot)

    def test_check_accepts_the_truth(self):
        slots = RunningSlots(3)
        slots.check([slots.take(), slots.take()])

    @pytest.mark.parametrize("owned", [[], [0], [0, 0], [0, 1, 2], [0, 3]])
    def test_check_finds_slots_lost_doubled_and_invented(self, owned: list[int]):
        slots = RunningSlots(3)
        slots.take()
        slots.take()
        with pytest.raises(AssertionError):
            slots.check(owned)


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

    def test_a_request_cannot_queue_twice(self):
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
