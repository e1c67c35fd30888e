"""Prompt tokens that wait to be computed, beside a cache of blocks of 4 tokens."""

from __future__ import annotations

from megatron_ext.config import EvictionPolicyName
from megatron_ext.scheduling.scheduler import Scheduler
from tests.unit_tests.scheduling.builders import add, make_limits, request_of, step


def test_prompts_count_until_they_are_computed():
    """RP-6: chunk by chunk, while requests wait and run; an answer does not count."""
    scheduler = Scheduler(make_limits(max_tokens=8, max_requests=2, chunked_prefill=True), EvictionPolicyName.LRU)
    assert scheduler.prompt_tokens_to_compute() == 0
    add(scheduler, *(request_of(arrival, range(100 * arrival, 100 * arrival + 12)) for arrival in range(3)))
    assert scheduler.prompt_tokens_to_compute() == 36
    counts = []
    for _ in range(6):
        step(scheduler)
        counts.append(scheduler.prompt_tokens_to_compute())
    assert counts[0] == 28
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] == 12, "the third one waits"


def test_cached_tokens_do_not_count():
    """RP-6: what a waiting request would skip, up to the last token, needs no replica."""
    scheduler = Scheduler(make_limits(max_requests=2), EvictionPolicyName.LRU)
    add(scheduler, request_of(0, range(12), num_tokens_to_generate=1))
    step(scheduler)
    add(scheduler, request_of(1, range(12)))
    add(scheduler, request_of(2, [*range(8), 7, 7, 7, 7]))
    add(scheduler, request_of(3, range(12), enable_prefix_caching=False))
    assert scheduler.prompt_tokens_to_compute() == 1 + 4 + 12


def test_without_a_snapshot_cached_tokens_are_computed_again():
    """RP-6: a model with recurrent layers resumes at snapshots only."""
    scheduler = Scheduler(make_limits(max_requests=2), EvictionPolicyName.LRU, slots=0)
    add(scheduler, request_of(0, range(12), num_tokens_to_generate=1))
    step(scheduler)
    add(scheduler, request_of(1, range(12)))
    assert scheduler.prompt_tokens_to_compute() == 12
