"""SI-6: tokens lost for lack of memory are those that a scheduler with enough memory skips."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from megatron_ext.config import EvictionPolicyName
from megatron_ext.prefix_cache.eviction_history import MAX_HASHES, EvictionHistory
from megatron_ext.scheduling.scheduler import Scheduler
from megatron_ext.scheduling.snapshots.placement import OpportunisticRules
from tests.unit_tests.scheduling.builders import add, make_limits, request_of, step

PROMPTS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), min_size=4, max_size=20)
LRU = EvictionPolicyName.LRU


def scheduler_of(blocks: int, slots: int | None) -> Scheduler:
    """Scheduler without opportunistic checkpoints; a checkpoint not taken, or given up, is not lost."""
    asked_for = OpportunisticRules(max_slots=0)
    return Scheduler(make_limits(block_size=2, total_blocks=blocks, opportunistic=asked_for), LRU, b"model", slots)


def serve(scheduler: Scheduler, prompts: list[list[int]]) -> list[tuple[int, int]]:
    """Serve requests one after the other and return the skipped and lost tokens of each."""
    found = []
    for i, prompt in enumerate(prompts):
        counters = scheduler.counters
        before = counters.lost_slot_tokens + counters.lost_block_tokens
        request = request_of(i, prompt, num_tokens_to_generate=1)
        add(scheduler, request)
        step(scheduler)
        assert request.is_ended
        found.append((request.ledger.skipped, counters.lost_slot_tokens + counters.lost_block_tokens - before))
    return found


def assert_lost_is_the_difference(prompts: list[list[int]], few: Scheduler, many: Scheduler) -> None:
    skipped = [skipped for skipped, _ in serve(many, prompts)]
    assert [sum(one) for one in serve(few, prompts)] == skipped


@settings(max_examples=30, deadline=None)
@given(PROMPTS)
def test_lost_to_blocks(prompts: list[list[int]]):
    few, many = scheduler_of(7, None), scheduler_of(500, None)
    assert_lost_is_the_difference(prompts, few, many)
    assert few.counters.lost_slot_tokens == 0
    assert many.counters.lost_requests == 0


@settings(max_examples=30, deadline=None)
@given(PROMPTS, st.integers(1, 3))
def test_lost_to_slots(prompts: list[list[int]], slots: int):
    few, many = scheduler_of(500, slots), scheduler_of(500, 500)
    assert_lost_is_the_difference(prompts, few, many)
    assert few.counters.lost_block_tokens == 0


def test_the_comparison_can_fail(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(EvictionHistory, "on_blocks_evicted", lambda self, block_hashes, states: None)
    prompts = [[1, 1, 1, 1], [0] * 12, [0, 1] * 6, [1, 1, 1, 1]]
    with pytest.raises(AssertionError):
        assert_lost_is_the_difference(prompts, scheduler_of(7, None), scheduler_of(500, None))


def test_only_so_much_is_remembered():
    history = EvictionHistory(3)
    for i in range(10):
        history.on_blocks_evicted([bytes([i])], None)
        history.on_snapshot_removed(bytes([i]))
    assert len(history) == 6
    assert history.lost(3, [bytes([0])], 0, 0, 2, None).for_blocks == 0  # the oldest is forgotten
    assert history.lost(3, [bytes([9])], 0, 0, 2, None).for_blocks == 2
    assert MAX_HASHES <= 2**16
    for name in (7, 10):
        history.on_blocks_evicted([bytes([name])], None)
    assert [history.block_ago(bytes([i])) is not None for i in (7, 8, 9, 10)] == [True, False, True, True], "gone again"
    history.check(set(), set())


def test_a_reset_loses_nothing_for_want_of_memory():
    """EX-4."""
    scheduler = scheduler_of(7, None)
    serve(scheduler, [[1, 1, 1, 1], [0] * 12, [0, 1] * 6])
    scheduler.reset_prefix_cache()
    assert serve(scheduler, [[1, 1, 1, 1]]) == [(0, 0)]
