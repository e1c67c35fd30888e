"""LA-1: chunks of `align` mode beside decodes, counted in steps and, for what follows them, in tokens."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_ext.config import EvictionPolicyName
from megatron_ext.scheduling.plan import SchedulerLimits, describe_tight_budget
from megatron_ext.scheduling.record import Outcome, Status
from megatron_ext.scheduling.scheduler import Scheduler
from tests.unit_tests.scheduling.builders import add, request_of, step

BLOCK = 64
ONE_BLOCK = SchedulerLimits(
    block_size=BLOCK,
    total_blocks=1000,
    paused_blocks=None,
    max_requests=16,
    max_tokens=BLOCK,
    max_sequence_length=4096,
    chunked_prefill=True,
    aligned_chunks=True,
)


def make_scheduler(**limits: object) -> Scheduler:
    return Scheduler(dataclasses.replace(ONE_BLOCK, **limits), EvictionPolicyName.LRU, slots=500)


def prompt(number: int, length: int) -> range:
    """Tokens that no other number has."""
    return range(10_000 * number, 10_000 * number + length)


def serve(scheduler: Scheduler, prompts: list, count: int) -> int:
    """Add all, let each generate `count` tokens: the steps that it takes."""
    requests = [request_of(number, tokens, num_tokens_to_generate=count) for number, tokens in enumerate(prompts)]
    add(scheduler, *requests)
    steps = 0
    while any(not request.is_ended for request in requests):
        for chunk in step(scheduler).chunks:
            if chunk.request.generated_count == count and not chunk.request.is_ended:
                scheduler.end(chunk.request, Outcome(Status.COMPLETED))
        steps += 1
    return steps


@pytest.mark.parametrize("budget", [BLOCK, BLOCK + 4, BLOCK + 16])
def test_prompts_take_about_as_many_steps_as_in_the_other_mode(budget: int):
    """Prompts were once served one at a time with a budget of one block, in 408 steps."""
    prompts = [prompt(number, 150) for number in range(12)]
    steps = [serve(make_scheduler(max_tokens=budget, aligned_chunks=a), prompts, 32) for a in (False, True)]
    if budget == BLOCK:
        assert steps == [62, 63]
    assert steps[1] <= steps[0] + 1


def test_a_prefill_beside_a_decode():
    """The prefill never stands still, the decode never waits, and states are kept at every boundary."""
    scheduler = make_scheduler()
    decoding, prefilling = request_of(0, prompt(0, 10)), request_of(1, prompt(1, 200))
    add(scheduler, decoding)
    step(scheduler)
    add(scheduler, prefilling)
    ends = []
    for _ in range(7):
        chunks = {chunk.request: chunk for chunk in step(scheduler).chunks}
        assert chunks[decoding].is_decode
        ends.append(chunks[prefilling].end)
    assert ends == [63, 64, 127, 128, 191, 192, 200]
    found = [scheduler.cache.states.find(block_hash) for block_hash in prefilling.block_hashes]
    assert len(found) == 3
    assert None not in found


def test_snapshots_of_a_busy_prefill_are_used():
    """A later request skips as much as after a prefill alone: up to the last common boundary, wherever it is."""
    for is_busy in (False, True):
        scheduler = make_scheduler()
        if is_busy:
            add(scheduler, request_of(9, prompt(9, 10)))
            step(scheduler)
        first = request_of(0, prompt(0, 300))
        add(scheduler, first)
        for _ in range(10):
            step(scheduler)
        assert first.computed_end >= 300
        for number, common in enumerate((70, 128, 200, 299), start=1):
            later = request_of(number, [*first.tokens[:common], *prompt(number, 50)])
            add(scheduler, later)
            step(scheduler)
            assert later.ledger.skipped == common // BLOCK * BLOCK
            scheduler.end(later, Outcome(Status.ABORTED))


def test_followers_of_a_leader_inside_a_block():
    """KV-6: followers wait though the leader stands inside a block, and it ends a chunk at the divergence."""
    scheduler = make_scheduler()
    shared = prompt(1, 150)
    add(scheduler, request_of(0, prompt(0, 10)))
    step(scheduler)
    leader, follower = request_of(1, [*shared, *prompt(2, 100)]), request_of(2, [*shared, *prompt(3, 100)])
    add(scheduler, leader)
    step(scheduler)
    assert leader.computed_end == 63
    add(scheduler, follower)
    ends = []
    for _ in range(5):
        step(scheduler)
        ends.append(leader.computed_end)
    assert ends[:3] == [64, 127, 128]
    assert follower.ledger.skipped == 128


def test_a_budget_that_holds_a_block_beside_all_decodes():
    assert describe_tight_budget(dataclasses.replace(ONE_BLOCK, max_tokens=BLOCK + 16)) is None
    for budget in (BLOCK, BLOCK + 15):
        line = describe_tight_budget(dataclasses.replace(ONE_BLOCK, max_tokens=budget))
        assert f"-max-tokens {budget} is less than a block of 64 tokens" in line
        assert "-max-requests 16 together" in line
        assert line.endswith("give 80")
