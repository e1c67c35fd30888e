"""Snapshots that a step takes are part of its plan; blocks of 4 tokens, ids are arrivals."""

from __future__ import annotations

import pickle

from megatron_ext.config import EvictionPolicyName
from megatron_ext.prefix_cache.snapshot_order import Rank
from megatron_ext.scheduling.plan import StepPlan
from megatron_ext.scheduling.planner import plan_step
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.scheduler import Scheduler
from tests.unit_tests.scheduling.builders import add, frozen, make_limits, request_of, step


def make_scheduler(*requests: Request, slots: int | None = 8, **limits: object) -> Scheduler:
    limits = {"total_blocks": 40, "max_tokens": 64} | limits
    scheduler = Scheduler(make_limits(**limits), EvictionPolicyName.LRU, slots=slots)
    add(scheduler, *requests)
    return scheduler


def planned(scheduler: Scheduler) -> StepPlan:
    """The next step's plan; making it changes nothing."""

    def everything() -> tuple:
        return frozen(scheduler.queues), pickle.dumps((vars(scheduler.cache), scheduler.pending_blocks))

    for request in scheduler.queues:
        assert request.block_hashes is not None  # made when first asked for
    before = everything()
    plan = plan_step(scheduler.queues, scheduler.limits, scheduler.cache, scheduler.pending_blocks)
    assert everything() == before
    return plan


def positions(plan: StepPlan) -> list[tuple[int, int, bool]]:
    return [(one.request.request_id, one.position, one.rank is Rank.OPTIONAL) for one in plan.snapshots]


def test_slots_go_to_awaited_snapshots_first_and_to_decodes_last():
    """HY-4, KV-6: the order in which slots are given out."""
    decoding = request_of(0, range(100, 107))
    scheduler = make_scheduler(decoding, max_requests=8)
    step(scheduler)  # the next one computes its eighth token: a boundary in decode
    leader, follower = request_of(1, range(17)), request_of(2, [*range(8), *range(50, 56)])
    add(scheduler, leader, follower)
    plan = planned(scheduler)
    assert [one.request for one in plan.deferrals] == [follower]
    assert positions(plan) == [(1, 8, False), (1, 16, False), (0, 8, True)]


def test_decode_past_a_boundary_names_the_replaced_snapshot():
    """HY-4: two boundaries in decode."""
    request = request_of(0, range(100, 103))
    scheduler = make_scheduler(request)
    seen = []
    for _ in range(8):
        plan = planned(scheduler)
        seen += [(one.position, one.instead_of) for one in plan.snapshots if one.rank is Rank.OPTIONAL]
        step(scheduler)
    assert seen == [(4, None), (8, request.block_hashes[0])]


def test_a_request_from_before_a_reset_leaves_no_snapshot():
    """EX-4."""
    request = request_of(0, range(10))
    scheduler = make_scheduler(request, max_tokens=6)
    step(scheduler)
    assert positions(planned(scheduler)) == [(0, 8, False)]
    scheduler.reset_prefix_cache()
    assert planned(scheduler).snapshots == ()
