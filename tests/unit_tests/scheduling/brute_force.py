"""The planner that looks at every waiting request in every step, and what it must have in common with ours."""

from __future__ import annotations

import dataclasses
from unittest import mock

from megatron_ext.prefix_cache.cache import PrefixCache
from megatron_ext.prefix_cache.hash_chain import BlockHash
from megatron_ext.scheduling import planner
from megatron_ext.scheduling.disk_loads import DiskLoads
from megatron_ext.scheduling.plan import Deferral, SchedulerLimits, SnapshotRequest, StepBudget, StepPlan
from megatron_ext.scheduling.prefix_wait.prefix_leaders import PendingBlocks, PrefixLeaders
from megatron_ext.scheduling.prefix_wait.waiting_queue import WaitingQueue
from megatron_ext.scheduling.queue import Queues
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.scheduler import Scheduler
from megatron_ext.scheduling.waiting_order import Line, WaitingOrder


def look_at_all(
    queues: Queues,
    limits: SchedulerLimits,
    budget: StepBudget,
    cache: PrefixCache,
    pending_blocks: PendingBlocks,
    disk_loads: DiskLoads,
    _continued: object,
) -> planner._Entry:
    """`_plan_admissions`, one request after the other, asleep or not; none of them has a group."""
    entry = planner._Entry([], [])
    leaders = PrefixLeaders(queues.running, pending_blocks)
    requested: set[BlockHash] = set()
    line = line_of_all(queues.waiting)
    for request in line:
        reads = planner.reads_cache(request)
        matched = match_one_by_one(request, cache) if reads else []
        is_let_down = len(matched) < queues.waiting.promised_blocks(request)
        leader = leaders.of(request, len(matched)) if reads and not is_let_down else None
        following = (
            None
            if leader is None
            else planner.wait_for_prefix(request, len(matched), leader, limits, budget, cache, requested)
        )
        if following is not None:
            entry.wait(following, line)
            if following.snapshot is not None and following.snapshot.block_hash not in requested:
                requested.add(following.snapshot.block_hash)
                budget = dataclasses.replace(budget, slots=budget.slots - 1)
            continue
        load = disk_loads.awaited_by(request, len(matched))
        if load is not None:
            entry.wait(Deferral(request, "disk", 1, 0, load=load), line)
            continue
        work, had_room = (
            planner._work_of(request, matched, limits, cache),
            all(one.resource != "prefills" for one in entry.deferrals),
        )
        if had_room and not line.may_pass(request, work):
            continue
        pinned = {block for block in matched if cache.is_evictable(block)} | budget.pinned
        is_full = not (budget.has_prefill_room and limits.may_prefill(budget.prefills, budget.prefill_tokens))
        decision, budget = planner.plan_admission(request, matched, limits, budget, cache)
        if is_full and had_room:
            entry.deferrals.append(Deferral(request, "prefills", 1, 0))
        if isinstance(decision, Deferral):
            entry.deferrals += [] if is_full else [decision]
            break
        assert budget.pinned == pinned, "pinned blocks are not the unused ones"
        if not is_full:
            entry.admissions.append(decision)
            line.admit(request, decision.work)
            leaders.add(decision)
    return entry


def line_of_all(waiting: WaitingQueue) -> Line:
    """Return a line with those who sleep."""
    order = WaitingOrder()
    order.keys, order.budgets = waiting.order.keys, waiting.order.budgets
    order.awake = sorted(waiting, key=order.keys.__getitem__)
    return Line(order)


def match_one_by_one(request: Request, cache: PrefixCache) -> list[int]:
    """Blocks up to the first that is not cached."""
    blocks = []
    for block_hash in request.block_hashes:
        block = cache.index.find(block_hash)
        if block is None:
            break
        blocks.append(block)
    return blocks


def plan_by_looking_at_all(scheduler: Scheduler) -> StepPlan:
    """Plan of the next step that looks at all waiting requests."""
    with mock.patch.object(planner, "_plan_admissions", look_at_all):
        return foreseen_plan(scheduler)


def foreseen_plan(scheduler: Scheduler) -> StepPlan:
    """Plan of the next step, without drafts."""
    return planner.plan_step(
        scheduler.queues,
        scheduler.limits,
        scheduler.cache,
        scheduler.pending_blocks,
        disk_loads=scheduler.disk_loads,
        holds_prefills=scheduler.holds_prefills,
    )


def assert_same_plan(plan: StepPlan, brute: StepPlan, sleepers: set[Request]) -> None:
    """Check that sleeping requests would only have followed, and that all others are planned equally."""
    for name in ("preemptions", "pauses", "resumes", "admissions", "chunks"):
        assert getattr(plan, name) == getattr(brute, name), f"other {name}"
    assert awaited_room(plan) == awaited_room(brute), "other requests wait for room or for the disk"
    assert set(plan.snapshots) == set(brute.snapshots), "other snapshots are asked for"
    assert snapshots_for_followers(plan) == snapshots_for_followers(brute), "followers ask for other snapshots"
    looked_at, following = followers(plan), followers(brute)
    assert looked_at.keys() <= following.keys(), "a request follows that should not"
    assert following.keys() - looked_at.keys() <= sleepers, "an awake request was passed over"
    assert all(following[request] == leader for request, leader in looked_at.items()), "another leader"


def followers(plan: StepPlan) -> dict[Request, int]:
    return {one.request: one.wait_for for one in plan.deferrals if one.wait_for is not None}


def awaited_room(plan: StepPlan) -> list[Deferral]:
    return [one for one in plan.deferrals if one.wait_for is None]


def snapshots_for_followers(plan: StepPlan) -> set[SnapshotRequest]:
    return {one.snapshot for one in plan.deferrals if one.snapshot is not None}
