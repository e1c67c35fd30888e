"""The transition at the end of a step: intervals, blocks, snapshots, tokens and ends, at once."""

from __future__ import annotations

from array import array

import pytest

from megatron_ext.config import EvictionPolicyName
from megatron_ext.scheduling.record import Outcome, Status
from megatron_ext.scheduling.scheduler import Scheduler
from megatron_ext.scheduling.step import describe_step
from tests.unit_tests.scheduling.builders import add, commit, frozen, make_limits, request_of


def scheduler_of(*requests: object, slots: int | None = None, **limits: object) -> Scheduler:
    scheduler = Scheduler(make_limits(**limits), EvictionPolicyName.LRU, slots=slots)
    add(scheduler, *requests)
    return scheduler


def test_a_step_is_taken_in_whole():
    """KV-5, KV-10: a request goes on, one ends by its count, one by its token, one is mid-prefill."""
    goes_on, counted = request_of(0, range(5)), request_of(1, range(10, 13), num_tokens_to_generate=1)
    stopped, long = request_of(2, range(20, 22), end=99), request_of(3, range(30, 45))
    scheduler = scheduler_of(goes_on, counted, stopped, long, total_blocks=20)
    plan = scheduler.schedule()
    ended = commit(scheduler, plan, {0: 7, 1: 8, 2: 99})
    assert ended == [counted, stopped]
    assert [request.finish_reason for request in (goes_on, counted, stopped)] == [None, "length", "stop"]
    assert [request.status for request in ended] == [Status.COMPLETED] * 2
    assert [request.block_table for request in ended] == [(), ()]
    assert (goes_on.tokens[5:], goes_on.computed_end, goes_on.is_decoding) == (array("I", [7]), 5, True)
    assert (long.computed_end, long.generated_count) == (6, 0)
    assert scheduler.counters.prefill_tokens == 5 + 3 + 2 + 6
    assert scheduler.cache.use().blocks_cached == 2
    scheduler.check()


def test_min_tokens_hold_for_the_termination_token_only():
    """KV-10."""
    request = request_of(0, range(3), end=99, num_tokens_to_generate=4, min_tokens=2)
    scheduler = scheduler_of(request)
    for expected in ([], [], [request]):
        assert commit(scheduler, scheduler.schedule(), {0: 99}) == expected
    assert (request.finish_reason, request.generated_tokens) == ("stop", [99, 99, 99])


@pytest.mark.parametrize("sampled", [{}, {0: 7}, {0: 7, 1: 8, 2: 9}, {0: 7, 2: 9}])
def test_a_token_for_each_chunk_that_yields_one_and_for_no_other(sampled: dict[int, int]):
    """Other tokens are refused, and the state is unchanged."""
    first, second, long = request_of(0, range(5)), request_of(1, range(10, 13)), request_of(2, range(30, 45))
    scheduler = scheduler_of(first, second, long, total_blocks=20)
    message = describe_step(scheduler.schedule().chunks, 4)
    before = frozen(scheduler.queues)
    with pytest.raises(AssertionError, match="for chunks of"):
        scheduler.commit(message, sampled)
    assert frozen(scheduler.queues) == before
    assert scheduler.commit(message, {0: 7, 1: 8}) == []
    assert [request.generated_tokens for request in (first, second, long)] == [[7], [8], []]


class TestRevise:
    """Revision of an outcome before it was reported."""

    @staticmethod
    def ended():
        request = request_of(0, range(3), num_tokens_to_generate=1)
        scheduler = scheduler_of(request)
        commit(scheduler, scheduler.schedule(), {0: 5})
        return request

    def test_another_reason(self):
        request = self.ended()
        request.revise(Outcome(Status.COMPLETED, finish_reason="stop"))
        record = request.to_record("")
        assert (record.status, record.finish_reason) == (Status.COMPLETED, "stop")
        assert [event.type.name for event in record.events].count("FINISH") == 1

    def test_a_failure(self):
        request = self.ended()
        request.revise(Outcome(Status.FAILED, error="words"))
        record = request.to_record("")
        assert (record.status, record.finish_reason, record.error) == (Status.FAILED, None, "words")
        assert [event.type.name for event in record.events[-3:]] == ["FIRST_TOKEN", "ERROR_NONTRANSIENT", "FAIL"]
