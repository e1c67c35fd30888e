"""SC-5: no request is overtaken by more work than its budget; a warm one goes before cold ones."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from megatron_ext.config import EvictionPolicyName
from megatron_ext.scheduling.overtaking import OvertakeBudgets, Work
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.scheduler import Scheduler
from tests.unit_tests.scheduling.builders import add, admitted, commit, make_limits, request_of, step

LRU = EvictionPolicyName.LRU


def longest_overtaking(seed: int, arrivals: int, budget: int) -> tuple[int, int]:
    """Play random requests; return the most work that overtook a request while it waited for its turn, and overtakes.

    The work is counted from admissions alone, without the scheduler's own account.
    """
    source = random.Random(seed)
    limits = make_limits(
        total_blocks=source.choice([24, 60]),
        max_requests=source.choice([1, 2, 4]),
        max_tokens=source.choice([16, 40]),
        overtake_tokens=budget,
    )
    scheduler = Scheduler(limits, LRU, b"", source.choice([None, 12]))
    stems = [[source.randrange(9) for _ in range(24)] for _ in range(3)]
    overtaken: dict[Request, int] = {}
    was_admitted: set[Request] = set()
    added = 0
    while added < arrivals or len(scheduler.queues):
        while added < arrivals and len(scheduler.queues.waiting) < 40 and source.random() < 0.9:
            prompt = source.choice(stems)[: source.choice([0, 8, 24])] + [
                source.randrange(9) for _ in range(source.randint(1, 24))
            ]
            add(scheduler, request_of(added, prompt, num_tokens_to_generate=source.randint(1, 8)))
            added += 1
        asleep = {request for request, _ in scheduler.queues.waiting.sleepers()}
        waiting = [request for request in scheduler.queues.waiting if request not in was_admitted | asleep]
        plan = scheduler.schedule()
        held = {one.request for one in plan.deferrals if one.wait_for is not None}
        entered: set[Request] = set()
        for one in plan.admissions:
            request = one.request
            if request not in was_admitted:
                work = request.prompt_length - one.chunk.start + request.params.num_tokens_to_generate
                for other in waiting:
                    if other.arrival < request.arrival and other not in held | entered:
                        overtaken[other] = overtaken.get(other, 0) + work
            entered.add(request)
        was_admitted |= entered
        commit(scheduler, plan)
        scheduler.check()
    assert len(was_admitted) == arrivals, "a request was never admitted"
    return max(overtaken.values(), default=0), scheduler.counters.overtakes


@pytest.mark.parametrize("budget", [0, 60, 400])
def test_no_request_is_overtaken_by_more_than_its_budget(budget):
    played = [longest_overtaking(seed, 100, budget) for seed in range(10)]
    assert min(budget, 1) <= max(most for most, _ in played) <= budget
    assert (sum(overtakes for _, overtakes in played) > 50) is (budget > 0)


def charge_nobody(*_: object) -> int:
    return 0


def always_allow(*_: object) -> bool:
    return True


def exempt_all(budgets: OvertakeBudgets, admitted: Iterable[Work], _exempt: object) -> int:
    return charge(budgets, admitted, [*budgets._competing])


charge = OvertakeBudgets.charge


@pytest.mark.parametrize(
    ("method", "mistake"), [("charge", charge_nobody), ("charge", exempt_all), ("allow", always_allow)]
)
def test_planted_mistakes_are_seen(monkeypatch, method, mistake):
    """Negative controls: no budget is charged, all requests are exempt, or no budget is asked for."""
    monkeypatch.setattr(OvertakeBudgets, method, mistake)
    monkeypatch.setattr(OvertakeBudgets, "check", lambda budgets: None)  # the account itself may show it, too
    assert max(longest_overtaking(seed, 100, 60)[0] for seed in range(10)) > 60


@pytest.mark.parametrize(("overtake_tokens", "place"), [(None, 8), (1000, 0), (0, 8)])
def test_a_warm_request_goes_before_cold_ones_within_their_budgets(overtake_tokens, place):
    """One cached prompt behind eight cold ones, one at a time."""
    limits = make_limits(max_requests=1, total_blocks=100, max_tokens=64, overtake_tokens=overtake_tokens)
    scheduler = Scheduler(limits, LRU)
    warm = [*range(40)]
    add(scheduler, request_of(0, warm, num_tokens_to_generate=1))
    step(scheduler)
    cold = [request_of(1 + i, range(100 * (i + 1), 100 * (i + 1) + 40), num_tokens_to_generate=1) for i in range(8)]
    add(scheduler, *cold, request_of(9, [*warm, 7], num_tokens_to_generate=1))
    order = []
    while len(scheduler.queues):
        order += [one for one, *_ in admitted(step(scheduler))]
    assert order.index(9) == place


def test_a_request_that_becomes_warm_while_it_waits_goes_first():
    scheduler = Scheduler(make_limits(max_requests=1, total_blocks=100, max_tokens=64, overtake_tokens=1000), LRU)
    add(scheduler, request_of(0, range(40), num_tokens_to_generate=3))
    for i in range(6):  # all of a short queue are matched in a step
        add(scheduler, request_of(1 + i, range(100 * (i + 1), 100 * (i + 1) + 40), num_tokens_to_generate=1))
    add(scheduler, request_of(11, [*range(40), 7, 8], num_tokens_to_generate=1))
    order = []
    while len(scheduler.queues):
        order += [one for one, *_ in admitted(step(scheduler))]
    assert order == [0, 11, *range(1, 7)]


def test_no_request_is_charged_while_it_waits_for_something_else():
    budgets, requests = OvertakeBudgets(100), [request_of(arrival, [arrival]) for arrival in range(5)]
    for request in requests:
        budgets.enter(request)
    assert budgets.charge([(requests[4], 10)], exempt=[requests[0]]) == 1
    budgets.leave(requests[4])
    budgets.suspend(requests[1])
    assert budgets.charge([(requests[3], 5), (requests[0], 50)], exempt=[]) == 1
    budgets.leave(requests[3])
    budgets.resume(requests[1])
    assert [budgets.charged(one) for one in requests[:3]] == [5, 10, 15]
    allowed = [budgets.allow(requests[2], work, [], []) for work in (90, 91)]
    assert allowed == [True, False], "request 1 has been charged most"
    assert budgets.allow(requests[2], 95, [requests[1]], [])
    assert not budgets.allow(requests[2], 60, [], [(requests[2], 40)])
    budgets.check()
