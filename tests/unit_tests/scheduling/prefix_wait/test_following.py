"""KV-6: blocks that followers are sure to find, and cases without waiting; blocks of 4 tokens, ids are arrivals."""

from __future__ import annotations

import pytest

from megatron_ext.config import EvictionPolicyName
from megatron_ext.scheduling.record import Outcome, Status
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.scheduler import Scheduler
from tests.unit_tests.scheduling.builders import add, admitted, followers, make_limits, request_of, step

LRU, REF_ZERO = EvictionPolicyName.LRU, EvictionPolicyName.REF_ZERO
BOTH = pytest.mark.parametrize("policy", [LRU, REF_ZERO])


def make_scheduler(policy: EvictionPolicyName, slots: int | None = None, **limits: object) -> Scheduler:
    return Scheduler(make_limits(**{"total_blocks": 20, "max_tokens": 64} | limits), policy, slots=slots)


def sharing(arrival: int, shared: int = 8) -> Request:
    return request_of(arrival, [*range(shared), 100 + arrival])


def run_prefills(scheduler: Scheduler) -> int:
    """Steps until all have ended, each with its first token."""
    steps = 0
    while len(scheduler.queues) and steps < 40:
        for chunk in step(scheduler).chunks:
            if chunk.request.generated_count and not chunk.request.is_ended:
                scheduler.end(chunk.request, Outcome(Status.COMPLETED))
        steps += 1
        scheduler.check()
    return steps


class TestBlocksOfALeaderThatHasEnded:
    """Blocks of an ended leader are kept only for the requests that waited for them."""

    @pytest.mark.parametrize("slots", [None, 4])
    @BOTH
    def test_sixteen_prompts_that_end_with_their_first_token_take_two_steps(self, policy, slots):
        """KV-4, KV-6: one request computes the shared prefix, fifteen skip it, with any policy."""
        limits = {"block_size": 64, "total_blocks": 64, "max_requests": 16, "max_tokens": 2048}
        scheduler = make_scheduler(policy, slots, **limits, max_sequence_length=128)
        add(scheduler, *(sharing(arrival, 64) for arrival in range(16)))
        assert run_prefills(scheduler) == 2
        assert scheduler.counters.skipped_tokens == 960
        assert scheduler.cache.use().blocks_cached == (1 if policy is LRU else 0)

    @BOTH
    def test_followers_do_not_wait_again_for_evicted_blocks(self, policy):
        """KV-6: else each would wait for the one before it, and lose its blocks again."""
        scheduler = make_scheduler(policy)
        leader = sharing(0)
        add(scheduler, leader, sharing(1), sharing(2))
        assert followers(step(scheduler)) == {1: 0, 2: 0}
        scheduler.end(leader, Outcome(Status.COMPLETED))
        assert scheduler.cache.use().blocks_evictable >= 2
        scheduler.cache.release(scheduler.cache.allocate(20))  # evicts all
        scheduler.check()
        add(scheduler, sharing(3))  # has not been promised anything
        plan = step(scheduler)
        assert admitted(plan) == [(1, 0, 3), (2, 0, 3)]
        assert followers(plan) == {3: 1} or followers(plan) == {3: 2}
        assert admitted(step(scheduler)) == [(3, 2, 1)]


class TestBoundaryOfTheLeader:
    """KV-6 with recurrent layers: a follower waits only if the leader has yet to pass the boundary."""

    @staticmethod
    def led(computed: int) -> tuple[Scheduler, Request]:
        """Leader of 17 tokens with so many computed, and after it a prompt of its first 12, to resume from 8."""
        scheduler = make_scheduler(LRU, slots=8, max_tokens=computed)
        add(scheduler, request_of(0, range(17)))
        step(scheduler)
        scheduler.limits = make_limits(total_blocks=20, max_tokens=32)
        follower = request_of(1, range(12))
        add(scheduler, follower)
        return scheduler, follower

    def test_it_waits_for_a_leader_before_the_boundary(self):
        """KV-6: which takes the states there."""
        scheduler, follower = self.led(computed=4)
        plan = step(scheduler)
        assert [(one.wait_for, one.snapshot.position) for one in plan.deferrals] == [(0, 8)]
        assert admitted(step(scheduler)) == [(1, 3, 0)]
        assert follower.ledger.skipped == 8

    def test_it_does_not_wait_for_a_leader_on_the_boundary(self):
        """KV-6: equality. The states at 8 are those from which the leader continues, and they are not kept."""
        scheduler, follower = self.led(computed=8)
        plan = step(scheduler)
        assert plan.deferrals == ()
        assert admitted(plan) == [(1, 2, 1)]
        assert [(chunk.start, chunk.end) for chunk in plan.chunks] == [(8, 17), (0, 12)]
        assert follower.ledger.skipped == 0

    def test_it_does_not_wait_for_states_that_no_slot_is_left_for(self):
        """KV-6: the leader could not keep them, and the wait would save nothing."""
        scheduler = make_scheduler(LRU, slots=0)
        add(scheduler, request_of(0, range(17)), request_of(1, range(12)))
        plan = step(scheduler)
        assert (len(plan.admissions), plan.deferrals) == (2, ())
