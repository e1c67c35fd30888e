"""RL-10, MF-9: log-probs and routing rows kept with cached blocks of 4 tokens; requests are named by their arrival."""

from __future__ import annotations

import pytest

from megatron_ext.config import EvictionPolicyName
from megatron_ext.prefix_cache.kept_data import DataKind
from megatron_ext.scheduling.planner import reads_disk
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.scheduler import Scheduler
from megatron_ext.scheduling.step import Scoring, describe_step
from tests.unit_tests.scheduling.builders import add, commit, followers, make_limits, request_of, step

WHOLE = range(12)  # three blocks


@pytest.fixture
def scheduler() -> Scheduler:
    return Scheduler(make_limits(keeps_log_probs=True, max_tokens=64, total_blocks=20), EvictionPolicyName.LRU)


def asking(arrival: int, *own: int, is_scored: bool = True) -> Request:
    return request_of(arrival, [*WHOLE, *own], num_tokens_to_generate=1, return_log_probs=is_scored)


def test_blocks_of_a_request_that_did_not_ask_are_computed_again(scheduler):
    """They have no log-probs to read until then."""
    skipped = []
    for arrival, is_scored in enumerate((False, True, True)):
        request = asking(arrival, 20, is_scored=is_scored)
        add(scheduler, request)
        step(scheduler)
        skipped.append(request.ledger.skipped)
    assert skipped == [0, 0, 12]


@pytest.mark.parametrize("is_scored", [True, False])
def test_a_request_waits_for_a_prefix_with_log_probs_only(scheduler, is_scored):
    """KV-6, KV-5: beside one that leaves none, it computes blocks that give way to those, and keeps none either."""
    add(scheduler, asking(0, 20, is_scored=is_scored), asking(1, 20))
    assert followers(step(scheduler)) == ({1: 0} if is_scored else {})
    assert len(scheduler.cache.kept._kept[DataKind.LOG_PROBS]) == (3 if is_scored else 0)


def test_the_token_after_kept_log_probs_is_scored(scheduler):
    """From the state at the end of the last block, which a prompt of whole blocks leaves, too."""
    found = []
    for request in (asking(0), asking(1, 20)):
        add(scheduler, request)
        plan = scheduler.schedule()
        found += [chunk.scoring for chunk in describe_step(plan.chunks, 4).chunks]
        commit(scheduler, plan)
    assert found == [
        Scoring(0, 11, tuple(range(1, 12)), top_n=0, keeps=True, block_ends=(0, 1, 2)),
        Scoring(11, 12, (20,), top_n=0, kept_end=12, keeps=True),
    ]


# Routing rows


@pytest.fixture
def replaying() -> Scheduler:
    return Scheduler(make_limits(keeps_routing=True, max_tokens=64, total_blocks=20), EvictionPolicyName.LRU)


def test_blocks_without_routing_rows_are_computed_once_more():
    """MF-9: whatever has dropped them; their computation is explained, and leaves the rows for the next request."""
    limits = make_limits(keeps_routing=True, explains=True, max_tokens=64, total_blocks=20)
    replaying = Scheduler(limits, EvictionPolicyName.LRU)
    found = []
    for arrival in range(4):
        request = asking(arrival, 20, is_scored=False)
        add(replaying, request)
        step(replaying)
        ledger = request.ledger
        found.append((ledger.skipped, ledger.reasons["no_routing_indices"], ledger.explanation.reason))
        if arrival == 1:
            replaying.drop_kept_data(request.block_hashes[1:2])
    assert found == [(0, 0, "not_cached"), (12, 0, "skipped_all"), (4, 8, "no_routing_indices"), (12, 0, "skipped_all")]


def test_blocks_that_generated_tokens_complete_have_routing_rows(replaying):
    """MF-9: the next turn of a chat skips them."""
    request = request_of(0, WHOLE, num_tokens_to_generate=5)
    add(replaying, request)
    while request.status is None:
        step(replaying)
    assert replaying.cache.kept.run(request.block_hashes, [DataKind.ROUTING]) == 4


def test_nothing_is_loaded_from_disk_for_requests_that_need_routing_rows(replaying, scheduler):
    """MF-9: entries on disk have none; their tokens would be computed all the same."""
    request, other = asking(0, is_scored=False), asking(1, is_scored=False)
    add(replaying, request)
    add(scheduler, other)
    assert [reads_disk(request), reads_disk(other)] == [False, True]
