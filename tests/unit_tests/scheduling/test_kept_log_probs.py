"""RL-10: log-probs of prompts that are kept with cached blocks of 4 tokens; requests are named by their arrival."""

from __future__ import annotations

import pytest

from megatron_ext.config import EvictionPolicyName
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
        skipped.append(request.sequence.ledger.skipped)
    assert skipped == [0, 0, 12]


@pytest.mark.parametrize("is_scored", [True, False])
def test_a_request_waits_for_a_prefix_with_log_probs_only(scheduler, is_scored):
    """KV-6, KV-5: beside one that leaves none, it computes blocks that give way to those, and keeps none either."""
    add(scheduler, asking(0, 20, is_scored=is_scored), asking(1, 20))
    assert followers(step(scheduler)) == ({1: 0} if is_scored else {})
    assert len(scheduler.cache.log_probs) == (3 if is_scored else 0)


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
