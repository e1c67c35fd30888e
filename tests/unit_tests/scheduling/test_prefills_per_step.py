"""SC-3: prefills of a step. Blocks of 4 tokens, ids are arrivals; a step is written as {request: (start, end)}."""

from __future__ import annotations

import pytest

from megatron_ext.config import EvictionPolicyName
from megatron_ext.scheduling.plan import StepPlan
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.scheduler import Scheduler
from tests.unit_tests.scheduling.builders import add, followers, make_limits, request_of, step

ROOM = {"total_blocks": 400, "max_requests": 16, "max_tokens": 64, "max_sequence_length": 400}


def make_scheduler(slots: int | None = None, *, caching: bool = False, **limits: object) -> Scheduler:
    return Scheduler(make_limits(**ROOM | limits), EvictionPolicyName.LRU if caching else None, slots=slots)


def unique(arrival: int, length: int, generate: int = 3) -> Request:
    """A prompt with nothing in common with others."""
    tokens = range(10_000 * (arrival + 1), 10_000 * (arrival + 1) + length)
    return request_of(arrival, tokens, num_tokens_to_generate=generate)


def chunks(plan: StepPlan) -> dict[int, tuple[int, int]]:
    return {chunk.request.request_id: (chunk.start, chunk.end) for chunk in plan.chunks}


def prefilled(plan: StepPlan) -> dict[int, tuple[int, int]]:
    return {request: span for request, span in chunks(plan).items() if request in prefills(plan)}


def prefills(plan: StepPlan) -> list[int]:
    return [chunk.request.request_id for chunk in plan.chunks if not chunk.is_decode]


def test_prefills_beside_decodes_are_bounded():
    """SC-4: together, not each; a step without decodes is filled, and a prompt that begins gets what is left."""
    scheduler = make_scheduler(prefill_tokens_beside_decodes=16)
    add(scheduler, unique(0, 100, generate=30))
    assert [prefilled(step(scheduler)) for _ in range(3)] == [{0: (0, 64)}, {0: (64, 100)}, {}]
    add(scheduler, unique(1, 20), unique(2, 30), unique(3, 5))
    assert [prefilled(step(scheduler)) for _ in range(4)] == [
        {1: (0, 16)},
        {1: (16, 20), 2: (0, 12)},
        {2: (12, 28)},
        {2: (28, 30), 3: (0, 5)},
    ]


def test_a_prompt_that_may_not_be_split_is_not_bounded():
    scheduler = make_scheduler(prefill_tokens_beside_decodes=16, chunked_prefill=False)
    add(scheduler, unique(0, 4, generate=30), unique(1, 50))
    assert prefilled(step(scheduler)) == {0: (0, 4), 1: (0, 50)}
    add(scheduler, unique(2, 50))
    assert prefilled(step(scheduler)) == {2: (0, 50)}


def test_a_held_prefill_begins_and_goes_on_later():
    """SC-4: decoding requests have the step to themselves; without them it is not held, so that none waits for ever."""
    scheduler = make_scheduler(prefill_tokens_beside_decodes=16)
    add(scheduler, unique(0, 4, generate=6), unique(1, 70), unique(2, 3))
    plans = [step(scheduler)]
    scheduler.hold_prefills(are_held=True)
    plans += [step(scheduler) for _ in range(6)]
    assert [prefilled(plan) for plan in plans] == [
        {0: (0, 4), 1: (0, 60)},
        {},
        {},
        {},
        {},
        {},
        {1: (60, 70), 2: (0, 3)},
    ]
    assert plans[1].deferrals[-1].resource == "prefills"


@pytest.mark.parametrize("is_held", [False, True])
def test_a_follower_of_a_request_behind_the_bound(is_held):
    """KV-6: the follower is looked at though the step has all its prefill, while its leader can leave states for it."""
    scheduler = make_scheduler(slots=20, caching=True, max_tokens=200, prefill_tokens_beside_decodes=16)
    add(scheduler, unique(0, 4, generate=30))
    step(scheduler)
    leader, other, follower = shared(1, 30), unique(2, 50), shared(3, 9)
    add(scheduler, leader, other)
    step(scheduler)
    scheduler.hold_prefills(are_held=is_held)
    add(scheduler, follower)
    assert followers(step(scheduler)) == {3: 1}
    scheduler.hold_prefills(are_held=False)
    while len(scheduler.queues):
        step(scheduler)
    assert [one.ledger.skipped for one in (leader, other, follower)] == [0, 0, 40]


def shared(arrival: int, own: int) -> Request:
    return request_of(arrival, [*range(40), *range(1000 * (arrival + 1), 1000 * (arrival + 1) + own)])


@pytest.mark.parametrize("limit", [0, 1])
def test_a_follower_of_a_delayed_request(limit):
    """KV-6: the follower is looked at while its leader computes, so the leader leaves states where the two part."""
    scheduler = make_scheduler(slots=20, caching=True, max_prefills=limit, max_tokens=200)
    leader, other, follower = shared(0, 30), unique(1, 50), shared(2, 9)
    add(scheduler, leader, other, follower)
    assert followers(step(scheduler)) == {2: 0}
    while len(scheduler.queues):
        step(scheduler)
    assert [one.ledger.skipped for one in (leader, other, follower)] == [0, 0, 40]
