"""KV-6: one of several requests with a common uncached prefix computes it; blocks of 4 tokens, ids are arrivals."""

from __future__ import annotations

import pytest

from megatron_ext.config import EvictionPolicyName
from megatron_ext.scheduling.prefix_wait.prefix_leaders import PendingBlocks
from megatron_ext.scheduling.record import Outcome, Status
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.scheduler import Scheduler
from tests.priority import TestPriority
from tests.unit_tests.scheduling.builders import add, admitted, asleep, followers, make_limits, request_of, step

pytestmark = pytest.mark.priority(TestPriority.HIGH)

LRU, REF_ZERO = EvictionPolicyName.LRU, EvictionPolicyName.REF_ZERO
SHARED = [*range(8)]


def make_scheduler(policy: EvictionPolicyName | None = LRU, **limits: object) -> Scheduler:
    return Scheduler(make_limits(**{"total_blocks": 20} | limits), policy)


def sharing(arrival: int, prefix: list[int] = SHARED, own: int = 1, **params: object) -> Request:
    """Request with `prefix` and some unique tokens."""
    return request_of(arrival, [*prefix, *range(100 * (arrival + 1), 100 * (arrival + 1) + own)], **params)


class TestFollowing:
    @pytest.mark.parametrize("policy", [LRU, REF_ZERO])
    def test_one_computes_the_others_wait_and_hit(self, policy):
        """KV-6: a prefix that three requests share is computed once."""
        scheduler = make_scheduler(policy)
        add(scheduler, sharing(0), sharing(1), sharing(2))
        plan = step(scheduler)
        assert admitted(plan) == [(0, 0, 3)]
        assert followers(plan) == {1: 0, 2: 0}
        assert len(plan.deferrals) == 2  # no request waits for room
        plan = step(scheduler)
        assert admitted(plan) == [(1, 2, 1), (2, 2, 1)]
        assert [(chunk.start, chunk.end) for chunk in plan.chunks if chunk.start == 8] == [(8, 9), (8, 9)]
        assert scheduler.counters.coordination_waits == 2
        assert scheduler.counters.skipped_tokens == 16

    def test_unrelated_requests_overtake_in_order(self):
        """KV-6: the follower keeps its place before later requests."""
        scheduler = make_scheduler(max_tokens=32)
        two, four = request_of(2, range(50, 55)), request_of(4, range(60, 65))
        add(scheduler, sharing(0), sharing(1), two, sharing(3), four)
        plan = step(scheduler)
        assert admitted(plan) == [(0, 0, 3), (2, 0, 2), (4, 0, 2)]
        assert [request.request_id for request in scheduler.queues.waiting] == [1, 3]
        assert admitted(step(scheduler)) == [(1, 2, 1)]  # one slot is left
        assert [request.request_id for request in scheduler.queues.waiting] == [3]

    def test_a_request_without_room_is_not_overtaken(self):
        """KV-6: only requests that wait for a prefix can be overtaken."""
        scheduler = make_scheduler(total_blocks=5)
        add(scheduler, sharing(0), sharing(1), request_of(2, range(50, 62)), request_of(3, [70]))
        plan = step(scheduler)
        assert admitted(plan) == [(0, 0, 3)]
        assert [(deferral.request.request_id, deferral.resource) for deferral in plan.deferrals] == [
            (1, "prefix"),
            (2, "blocks"),
        ]

    def test_a_deferred_request_has_no_followers(self):
        """KV-6: a request that is not admitted leads no other."""
        scheduler = make_scheduler(max_requests=1)
        add(scheduler, request_of(0, [70]), sharing(1), sharing(2))
        plan = step(scheduler)
        assert followers(plan) == {}
        assert scheduler.counters.coordination_waits == 0

    def test_a_prefix_that_is_cached_is_not_waited_for(self):
        """KV-6: the leader of the rest is."""
        scheduler = make_scheduler()
        add(scheduler, sharing(0))
        step(scheduler)
        longer = [*SHARED, 20, 21, 22, 23]
        add(scheduler, sharing(1), sharing(2, longer), sharing(3, longer))
        plan = step(scheduler)
        assert admitted(plan) == [(1, 2, 1), (2, 2, 2)]
        assert followers(plan) == {3: 2}

    def test_prefixes_shorter_than_a_block_are_not_waited_for(self):
        """KV-6: such prefixes would not give a hit."""
        scheduler = make_scheduler()
        add(scheduler, sharing(0, [1, 2, 3], own=5), sharing(1, [1, 2, 3], own=5))
        assert len(admitted(step(scheduler))) == 2

    def test_a_prefix_that_grows_by_followers_is_computed_part_by_part(self):
        """KV-6: a request that waits for one part and then for the next counts once as waiting."""
        scheduler = make_scheduler()
        longer = [*SHARED, 20, 21, 22, 23]
        add(scheduler, sharing(0), sharing(1, longer), sharing(2, longer))
        assert followers(step(scheduler)) == {1: 0, 2: 0}
        plan = step(scheduler)
        assert admitted(plan) == [(1, 2, 2)]
        assert followers(plan) == {2: 1}
        assert admitted(step(scheduler)) == [(2, 3, 1)]
        assert scheduler.counters.coordination_waits == 2

    def test_blocks_of_a_decode_are_not_awaited(self):
        """KV-6: the tokens that decoding will fill in are unknown."""
        scheduler = make_scheduler()
        first = request_of(0, range(6))
        add(scheduler, first)
        step(scheduler)
        add(scheduler, request_of(1, [*first.tokens, 77, 78]))
        assert admitted(step(scheduler)) == [(1, 1, 2)]


class TestLeaders:
    """Events of a leader with a chunked prefill of 4 tokens a step."""

    @staticmethod
    def led(policy: EvictionPolicyName = LRU) -> tuple[Scheduler, list[Request]]:
        """Requests 0, 1 and 2 share 8 tokens, of which 0 has computed 4."""
        scheduler = make_scheduler(policy, max_tokens=4)
        requests = [sharing(0), sharing(1), sharing(2)]
        add(scheduler, *requests)
        assert followers(step(scheduler)) == {1: 0, 2: 0}
        return scheduler, requests

    def test_followers_wait_for_the_end_of_the_shared_prefix(self):
        """KV-6, chunked prefill: neither for the first chunk only nor for the leader's own tokens."""
        scheduler = make_scheduler(max_tokens=6)
        leader, follower = sharing(0, own=8), sharing(1)
        add(scheduler, leader, follower)
        assert followers(step(scheduler)) == {1: 0}
        assert scheduler.cache.use().blocks_cached == 1  # [0, 4) of [0, 6)
        assert asleep(scheduler) == {1: 0}
        assert followers(step(scheduler)) == {}  # [6, 12): now all they share is there
        assert asleep(scheduler) == {}
        plan = step(scheduler)
        assert admitted(plan) == [(1, 2, 1)]
        assert [(chunk.request.request_id, chunk.start, chunk.end) for chunk in plan.chunks] == [(0, 12, 16), (1, 8, 9)]
        assert scheduler.counters.coordination_waits == 1

    @pytest.mark.parametrize("status", [Status.ABORTED, Status.FAILED])
    @pytest.mark.parametrize(("policy", "kept"), [(LRU, 1), (REF_ZERO, 0)])
    def test_when_it_leaves_the_first_follower_leads(self, status, policy, kept):
        """KV-6, EX-8: the others follow the new leader, and keep what the old one had published."""
        scheduler, requests = self.led(policy)
        scheduler.end(requests[0], Outcome(status))
        plan = step(scheduler)
        assert admitted(plan) == [(1, kept, 3 - kept)]
        assert followers(plan) == {2: 1}
        for _ in range(3):
            plan = step(scheduler)
        assert requests[2] in scheduler.queues.running
        assert requests[2].ledger.skipped == 8
        assert scheduler.counters.coordination_waits == 2  # no request is counted twice

    def test_when_its_forward_fails_it_begins_again(self):
        """KV-5, KV-6: the leader is the oldest request, so it begins again."""
        scheduler, _ = self.led()
        plan = scheduler.schedule()
        scheduler.abandon(plan.chunks, "planted")
        plan = step(scheduler)
        assert admitted(plan) == [(0, 1, 2)]
        assert followers(plan) == {1: 0, 2: 0}

    def test_when_its_forward_fails_an_older_follower_leads(self):
        """KV-6."""
        scheduler = make_scheduler(max_tokens=4)
        add(scheduler, sharing(1))
        step(scheduler)
        add(scheduler, sharing(0))  # as one that was preempted
        plan = scheduler.schedule()
        assert followers(plan) == {0: 1}
        scheduler.abandon(plan.chunks, "planted")
        plan = step(scheduler)
        assert admitted(plan) == [(0, 1, 2)]
        assert followers(plan) == {1: 0}

    def test_when_all_are_suspended_it_leads_again_from_the_start(self):
        """KV-6."""
        scheduler, _ = self.led()
        scheduler.suspend()
        plan = step(scheduler)
        assert admitted(plan) == [(0, 0, 3)]
        assert followers(plan) == {1: 0, 2: 0}

    @pytest.mark.parametrize("computed", [3, 4])
    def test_after_a_reset_the_old_leader_has_no_followers(self, computed):
        """KV-6, EX-4: the first follower leads at once, wherever the old leader is."""
        scheduler = make_scheduler(max_tokens=computed)
        add(scheduler, sharing(0), sharing(1), sharing(2))
        step(scheduler)
        scheduler.reset_prefix_cache()
        assert scheduler.pending_blocks.requests() == set()
        scheduler.limits = make_limits(total_blocks=20)
        plan = step(scheduler)
        assert admitted(plan) == [(1, 0, 3)]
        assert followers(plan) == {2: 1}

    @pytest.mark.parametrize("policy", [LRU, REF_ZERO])
    def test_a_leader_that_ends_with_its_prefill_leaves_its_blocks_to_its_followers(self, policy):
        """KV-6, KV-4: the blocks are dropped when no request waits for them any more, under ref_zero too."""
        scheduler = make_scheduler(policy)
        leader = sharing(0)
        add(scheduler, leader, sharing(1))
        step(scheduler)
        scheduler.end(leader, Outcome(Status.COMPLETED))
        assert admitted(step(scheduler)) == [(1, 2, 1)]
        assert scheduler.counters.hits == 1


class TestWhoStaysApart:
    @pytest.mark.parametrize("leader_opts_out", [True, False])
    def test_opted_out(self, leader_opts_out):
        """KV-6, KV-9: a request that opted out neither leads nor follows."""
        scheduler = make_scheduler(max_tokens=32)
        wishes = (not leader_opts_out, leader_opts_out)
        add(scheduler, *(sharing(i, enable_prefix_caching=wish) for i, wish in enumerate(wishes)))
        assert admitted(step(scheduler)) == [(0, 0, 3), (1, 0, 3)]
        assert scheduler.counters.coordination_waits == 0

    def test_salts(self):
        """KV-6, EX-3: tenants wait for their own kind only."""
        scheduler = make_scheduler(max_tokens=40)
        salts = [None, "a", "b", "", "a", None]
        add(scheduler, *(sharing(i, cache_salt=salt) for i, salt in enumerate(salts)))
        plan = step(scheduler)
        assert admitted(plan) == [(i, 0, 3) for i in range(4)]
        assert followers(plan) == {4: 1, 5: 0}

    def test_prompt_log_probs(self):
        """KV-6, EX-5: such requests compute their own prompt and never wait; others may hit their blocks."""
        scheduler = make_scheduler(max_tokens=40)
        add(scheduler, sharing(0), sharing(1, return_log_probs=True), sharing(2))
        plan = step(scheduler)
        assert admitted(plan) == [(0, 0, 3), (1, 0, 3)]
        assert set(followers(plan)) == {2}

    def test_prompt_log_probs_lead(self):
        """KV-6: such requests write the cache, so they lead."""
        scheduler = make_scheduler()
        add(scheduler, sharing(0, return_log_probs=True), sharing(1), sharing(2, return_log_probs=True))
        plan = step(scheduler)
        assert followers(plan) == {1: 0}
        assert admitted(step(scheduler))[0] == (1, 2, 1)

    def test_log_probs_of_generated_tokens_only(self):
        """KV-6: requests for log-probs of generated tokens follow like all others."""
        scheduler = make_scheduler()
        add(scheduler, sharing(0), sharing(1, return_log_probs=True, skip_prompt_log_probs=True))
        assert followers(step(scheduler)) == {1: 0}

    def test_caching_off(self):
        """KV-8: no request waits, everything is computed."""
        scheduler = make_scheduler(None, max_tokens=32)
        add(scheduler, sharing(0), sharing(1))
        assert admitted(step(scheduler)) == [(0, 0, 3), (1, 0, 3)]


class TestRetriedAdmission:
    """KV-13: an admission that is deferred changes no count, and is counted once when it succeeds."""

    @staticmethod
    def deferred_for(resource: str) -> tuple[Scheduler, Request, Request]:
        """Scheduler that defers the last of the requests, and the request in its way."""
        limits = {"blocks": {"total_blocks": 5}, "requests": {"max_requests": 1}, "tokens": {"chunked_prefill": False}}
        scheduler = make_scheduler(**limits[resource])
        first = sharing(0, own=4)
        add(scheduler, first)
        step(scheduler)
        if resource == "tokens":
            add(scheduler, request_of(1, range(50, 63)))
        request = sharing(2, own=12 if resource == "blocks" else 4)
        add(scheduler, request)
        return scheduler, first, request

    @pytest.mark.parametrize("resource", ["blocks", "requests", "tokens"])
    def test_a_hit_is_counted_when_it_is_used(self, resource):
        scheduler, first, request = self.deferred_for(resource)
        for _ in range(1 if resource == "tokens" else 3):
            plan = step(scheduler)
            assert (plan.deferrals[-1].request, plan.deferrals[-1].resource) == (request, resource)
            counters = scheduler.counters
            assert (counters.hits, counters.blocks_matched, counters.skipped_tokens) == (0, 0, 0)
            assert (request.ledger.matched_blocks, request.ledger.skipped) == (None, 0)
            assert request.block_table == ()
        scheduler.end(first, Outcome(Status.COMPLETED))
        assert [one[:2] for one in admitted(step(scheduler))] == [(2, 2)]
        assert (counters.hits, counters.blocks_matched, counters.skipped_tokens) == (1, 2, 8)
        assert (request.ledger.matched_blocks, request.ledger.skipped) == (2, 8)
        assert [event.type.name for event in request.timeline.events].count("ADD_CONTEXT") == 1


class TestBlocksInFlight:
    """KV-6: division of the computing between requests."""

    def test_the_first_of_several_leads_until_it_has_published_or_left(self):
        blocks = PendingBlocks()
        for request in (7, 3, 5):
            blocks.add(request, [b"a", b"b"])
        assert blocks.leader(b"a") == 7
        blocks.published(7, [b"a"])
        assert (blocks.leader(b"a"), blocks.leader(b"b")) == (3, 7)
        blocks.discard(7)
        blocks.discard(3)
        assert (blocks.leader(b"a"), blocks.leader(b"b")) == (5, 5)
        assert blocks.requests() == {5}

    def test_a_request_that_published_all_its_blocks_is_forgotten(self):
        blocks = PendingBlocks()
        blocks.add(1, [b"a", b"b"])
        blocks.published(1, [b"a"])
        blocks.published(1, [b"b"])
        assert blocks.requests() == set()
        assert blocks.leader(b"a") is None
        assert blocks.leader(b"b") is None

    def test_strangers_and_repeats_change_nothing(self):
        """Blocks completed in decode are published too, and requests leave that never computed a block."""
        blocks = PendingBlocks()
        blocks.add(1, [b"a", b"a"])
        blocks.add(2, [])
        blocks.published(1, [b"x"])
        blocks.published(9, [b"a"])
        blocks.discard(9)
        assert blocks.leader(b"a") == 1
        assert blocks.requests() == {1}
        blocks.discard(1)
        blocks.discard(1)
        assert blocks.leader(b"a") is None
