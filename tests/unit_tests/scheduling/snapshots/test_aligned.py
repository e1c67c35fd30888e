"""LA-1: chunks of `align` mode beside decodes, counted in steps and, for what follows them, in tokens."""

from __future__ import annotations

import dataclasses

from megatron_ext.config import EvictionPolicyName
from megatron_ext.scheduling.plan import SchedulerLimits, describe_tight_budget
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
