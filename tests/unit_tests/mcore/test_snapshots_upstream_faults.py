"""Faults of Megatron's own prefix caching that concern states, one test each; ours must not have them.

Numbers are those of `upstream_facts.md`, section 9 A. A 9 (a failed forward stays registered) is in
`test_snapshots_failure.py`, A 10 (slots for requests that stay away) in `test_snapshots_positions.py`, A 13 (other
weights) in `test_snapshots_invalidation.py`.
"""

from __future__ import annotations

import pytest

from tests.priority import TestPriority
from tests.unit_tests.support.caching import BLOCK, POLICIES
from tests.unit_tests.support.driver import assert_equals_oracle, make_prompt
from tests.unit_tests.support.hybrid_caching import build_driver

pytestmark = pytest.mark.priority(TestPriority.HIGH)

STEPS = [{"max_tokens": 400}, {"max_tokens": 20}, {"max_tokens": 400, "enable_chunked_prefill": False}]


@pytest.fixture
def oracle(get_oracle):
    return get_oracle("hybrid")


@pytest.mark.parametrize("batching", STEPS)
class TestClampThatUndoesARestore:
    """A 1: upstream lowers the skip to leave two tokens, to a boundary without a state, and goes on from zero."""

    def test_one_token_behind_the_only_snapshot(self, get_oracle, oracle, batching):
        driver = build_driver(get_oracle, **batching)
        prompt = make_prompt(4 * BLOCK + 1)
        driver.sight(0, prompt)
        assert driver.snapshots_of(prompt) == [64]
        assert driver.sight(1, prompt) == 64
        assert driver.seen[1].chunks[0] == (64, 65)
        assert_equals_oracle(driver, 1, oracle)

    def test_the_only_snapshot_is_at_the_end(self, get_oracle, oracle, batching):
        """No resume is possible, since one token must be computed."""
        driver = build_driver(get_oracle, **batching)
        prompt = make_prompt(4 * BLOCK)
        driver.sight(0, prompt)
        driver.forget(prompt, [48])
        assert driver.snapshots_of(prompt) == [64]
        assert driver.sight(1, prompt) == 0
        assert_equals_oracle(driver, 1, oracle)

    def test_there_is_an_earlier_one(self, get_oracle, oracle, batching):
        driver = build_driver(get_oracle, **batching)
        prompt = make_prompt(4 * BLOCK)
        driver.sight(0, prompt[: BLOCK + 1])
        driver.sight(1, prompt)
        driver.forget(prompt, [48])
        assert driver.sight(2, prompt) == 16
        assert_equals_oracle(driver, 2, oracle)


@pytest.mark.parametrize("slots", [100, 0])
@pytest.mark.parametrize("max_tokens", [16, 20, 32, 48])
def test_continuation_chunks_that_skip_on_a_kv_match(get_oracle, oracle, slots, max_tokens):
    """A 2: the blocks of the whole prompt are cached, its states are not; every chunk computes all of its tokens."""
    driver = build_driver(get_oracle, slots=slots, max_tokens=max_tokens)
    prompt = make_prompt(6 * BLOCK + 3)
    driver.sight(0, prompt)
    if slots:
        driver.forget(prompt, [64, 96])
    assert driver.sight(1, prompt) == 0
    assert driver.records[1].matched_block_count == 6
    prefill = [chunk for chunk in driver.seen[1].chunks if chunk[0] < len(prompt)]
    assert len(prefill) > 1
    assert [start for start, _ in prefill] == [0, *(end for _, end in prefill[:-1])]
    assert_equals_oracle(driver, 1, oracle)


@pytest.mark.parametrize("max_tokens", [20, 400])
def test_stale_maps_after_a_resume(get_oracle, oracle, max_tokens):
    """A 3: the same slots and blocks hold other contents when the old prompt comes again."""
    driver = build_driver(get_oracle, slots=2, is_exact=False, block_count=12, max_tokens=max_tokens)
    old = [make_prompt(2 * BLOCK + 5, seed=seed) for seed in range(2)]
    new = [make_prompt(2 * BLOCK + 5, seed=seed) for seed in range(2, 4)]
    for request_id, prompt in enumerate(old):
        driver.sight(request_id, prompt)
    driver.add(2, make_prompt(60))
    driver.step()
    driver.engine.suspend()
    driver.engine.resume()
    driver.run()
    for request_id, prompt in enumerate([*new, *old, *old], start=3):
        assert driver.sight(request_id, prompt) == (32 if request_id >= 7 else 0)
        assert_equals_oracle(driver, request_id, oracle)


@pytest.mark.parametrize("max_tokens", [20, 400])
def test_prompt_log_probs_with_a_skip(get_oracle, oracle, max_tokens):
    """A 4: upstream files generated log-probs under the prompt's; a request for those skips no tokens."""
    driver = build_driver(get_oracle, max_tokens=max_tokens)
    prompt = make_prompt(4 * BLOCK + 5)
    driver.sight(0, prompt)
    assert driver.sight(1, prompt, skip_prompt_log_probs=False) == 0
    assert driver.sight(2, prompt) == 64
    assert (len(driver.records[1].prompt_log_probs), len(driver.records[1].generated_log_probs)) == (68, 4)
    assert (driver.records[2].prompt_log_probs, len(driver.records[2].generated_log_probs)) == (None, 4)
    for request_id in range(3):
        assert_equals_oracle(driver, request_id, oracle)


def test_an_admission_that_finds_no_room(get_oracle, oracle):
    """A 5: neither pins nor slots nor the snapshot's turn are touched by a request that cannot enter yet."""
    driver = build_driver(get_oracle, slots=2, max_requests=1)
    one, two, three = (make_prompt(BLOCK + 1, seed=seed) for seed in range(3))
    driver.sight(0, one)
    driver.sight(1, two)
    driver.add(2, three, num_tokens_to_generate=10)
    driver.add(3, one)  # would resume from the older snapshot, and waits for the only slot
    driver.step()
    assert driver.snapshots_of(one) == []  # so that one was given up
    assert driver.snapshots_of(two) == [16]
    driver.run()
    assert driver.skipped(3) == [0]
    for request_id in range(4):
        assert_equals_oracle(driver, request_id, oracle)


@pytest.mark.parametrize("policy", POLICIES)
def test_two_owners_of_the_same_contents(get_oracle, oracle, policy):
    """A 7: two compute the same prompt side by side; the one that leaves first takes nothing of the other's along."""
    driver = build_driver(get_oracle, policy=policy)
    prompt = make_prompt(3 * BLOCK + 2)
    driver.add(0, prompt, num_tokens_to_generate=2)
    driver.add(1, prompt, num_tokens_to_generate=30, skip_prompt_log_probs=False)
    driver.step()
    assert driver.steps[0] == ((0, 0, 50), (1, 0, 50))
    while 0 not in driver.records:
        driver.step()
    driver.add(2, prompt)
    driver.run()
    assert driver.skipped(2) == [48]
    assert driver.scheduler.cache.use().blocks_cached == (0 if policy == "ref_zero" else 4)
    for request_id in range(3):
        assert_equals_oracle(driver, request_id, oracle)


def test_shared_blocks_that_are_written_again(get_oracle, oracle):
    """A 8: what is computed again because its states are missing is not written; other readers are in the batch."""
    driver = build_driver(get_oracle, max_tokens=50)
    prompt = make_prompt(4 * BLOCK + 5)
    driver.add(0, prompt, num_tokens_to_generate=20)
    driver.step()
    driver.step()
    driver.forget(prompt, [64])
    blocks = driver.engine.get_request(0).block_table[:4]
    before = driver.context.memory_buffer[:, :, blocks].clone()
    driver.add(1, [*prompt, 5])
    driver.add(2, [*prompt[:40], 6])
    driver.run()
    assert driver.skipped(1, 2) == [0, 0]
    assert driver.writes.dropped == 4 * (64 + 32)
    assert driver.context.memory_buffer[:, :, blocks].equal(before)
    for request_id in range(3):
        assert_equals_oracle(driver, request_id, oracle)


def test_a_hole_in_the_chain(get_oracle, oracle):
    """A 11: blocks evicted from a chain's end, or its snapshots: a shorter match, and a resume point within it."""
    driver = build_driver(get_oracle, slots=10, is_exact=False, block_count=8)
    prompt = make_prompt(5 * BLOCK + 2)
    driver.sight(0, prompt[: 2 * BLOCK + 1])
    driver.sight(1, prompt)
    driver.sight(2, make_prompt(4 * BLOCK, seed=1))
    assert driver.scheduler.cache.use().blocks_evicted > 0
    assert driver.sight(3, prompt) == 32
    assert 2 <= driver.records[3].matched_block_count < 5
    assert_equals_oracle(driver, 3, oracle)
