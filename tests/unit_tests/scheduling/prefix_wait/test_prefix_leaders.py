"""KV-6: one of several requests with a common uncached prefix computes it; blocks of 4 tokens, ids are arrivals."""

from __future__ import annotations

import pytest

from megatron_ext.config import EvictionPolicyName
from megatron_ext.scheduling.prefix_wait.prefix_leaders import PendingBlocks
from megatron_ext.scheduling.record import Outcome, Status
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.scheduler import Scheduler
from tests.unit_tests.scheduling.builders import add, admitted, followers, make_limits, request_of, step

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
