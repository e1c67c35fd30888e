"""Negative controls: the cache broken in one way at a time; the comparison with the truth must turn red.

Each control runs the same two prompts over an engine that nothing else watches. As it is, all is equal.
"""

from __future__ import annotations

import dataclasses

import pytest

from megatron_ext.config import CacheConfig
from megatron_ext.prefix_cache import matching
from megatron_ext.prefix_cache.cache import PrefixCache
from megatron_ext.prefix_cache.hash_chain import HashChain, root_hash
from megatron_ext.scheduling import cache_keys, planner
from megatron_ext.scheduling.scheduler import Scheduler
from megatron_ext.scheduling.step import ScheduledStep
from tests.priority import TestPriority
from tests.unit_tests.support.caching import BLOCK, Broken, failing_forward
from tests.unit_tests.support.driver import Driver, assert_equals_oracle, make_prompt

pytestmark = pytest.mark.priority(TestPriority.HIGH)

FIRST, SECOND = 0, 1
PROMPT = make_prompt(5 * BLOCK)


@pytest.fixture
def driver(get_driver) -> Driver:
    return get_driver("attention_only", cache=CacheConfig(), max_tokens=60)


def play(driver: Driver, **params: object) -> None:
    """A prompt, and while it decodes the same prompt with another end: four blocks and more are shared."""
    driver.add(FIRST, PROMPT, num_tokens_to_generate=16, skip_prompt_log_probs=True)
    for _ in range(3):
        driver.step()
    second = [*PROMPT[: 4 * BLOCK + 5], *make_prompt(20, seed=1)]
    driver.add(SECOND, second, num_tokens_to_generate=8, **({"skip_prompt_log_probs": True} | params))
    driver.run()


def assert_is_seen(driver: Driver, oracle: object, request_id: int = SECOND) -> None:
    """Check that some logits are far from the oracle's for the preceding tokens, or NaN from unwritten memory."""
    with pytest.raises(AssertionError):
        assert_equals_oracle(driver, request_id, oracle)
    record = driver.records[request_id]
    tokens = [*record.prompt_tokens, *record.generated_tokens]
    far = [
        not (logits[-1] - oracle.logits(tokens[:count])[-1]).abs().max() < 1e-3
        for count, logits in driver.seen[request_id].logits.items()
    ]
    assert any(far)


def test_nothing_is_broken(driver, oracle):
    play(driver)
    assert driver.records[SECOND].skipped_prefill_token_count == 4 * BLOCK
    for request_id in (FIRST, SECOND):
        assert_equals_oracle(driver, request_id, oracle)


def test_the_wrong_block_is_matched(driver, oracle, monkeypatch):
    """The run is right, its blocks are one place off."""
    match = PrefixCache.match
    monkeypatch.setattr(PrefixCache, "match", lambda self, block_hashes: match(self, block_hashes)[1:])
    play(driver)
    assert driver.records[SECOND].skipped_prefill_token_count == 3 * BLOCK
    assert_is_seen(driver, oracle)


def test_a_hash_that_forgets_what_came_before(driver, oracle, monkeypatch):
    """Blocks keyed by their own tokens only: KV depends on everything before, and this shows."""

    def forget(self: HashChain, tokens: list[int]) -> list[bytes]:
        ends = range(BLOCK, len(tokens) + 1, BLOCK)
        return [root_hash([bytes(tokens[end - BLOCK : end])]) for end in ends]

    monkeypatch.setattr(HashChain, "extend", forget)
    driver.add(FIRST, PROMPT, num_tokens_to_generate=15, skip_prompt_log_probs=True)
    driver.step()
    driver.step()
    driver.add(SECOND, [*PROMPT[:BLOCK], *PROMPT[2 * BLOCK :], 5], skip_prompt_log_probs=True)
    driver.run()
    assert driver.records[SECOND].skipped_prefill_token_count == 4 * BLOCK
    assert_is_seen(driver, oracle)


def test_publishing_before_computing(driver, oracle, monkeypatch):
    """The prompt's blocks can be found as soon as they are allocated: after a failed step they hold nothing."""

    def admit_and_publish(self: Scheduler, admission: planner.Admission) -> None:
        admit(self, admission)
        request = admission.request
        run = slice(request.sequence.published_blocks, len(request.block_hashes))
        parent = request.block_hashes[run.start - 1] if run.start else None
        self.cache.publish(request.block_hashes[run], request.block_table[run], parent)

    admit = Scheduler._admit
    monkeypatch.setattr(Scheduler, "_admit", admit_and_publish)
    driver.add(FIRST, PROMPT, skip_prompt_log_probs=True)
    with failing_forward(0), pytest.raises(Broken):
        driver.step()
    driver.run()
    assert driver.records[FIRST].skipped_prefill_token_count == 5 * BLOCK - 1
    assert_is_seen(driver, oracle, FIRST)


def test_a_failed_forward_that_publishes(driver, oracle, monkeypatch):
    """A failed forward that publishes its blocks is seen: another request finds blocks that were not computed."""

    def commit_and_abandon(self: Scheduler, chunks: tuple, reason: str) -> None:
        self._advance([chunk.request for chunk in chunks], [chunk.end for chunk in chunks])
        abandon(self, chunks, reason)

    abandon = Scheduler.abandon
    monkeypatch.setattr(Scheduler, "abandon", commit_and_abandon)
    driver.add(FIRST, PROMPT[: 3 * BLOCK], skip_prompt_log_probs=True)
    with failing_forward(0), pytest.raises(Broken):
        driver.step()
    driver.add(SECOND, PROMPT, skip_prompt_log_probs=True)
    while SECOND not in driver.records:
        driver.step()
    assert driver.records[SECOND].skipped_prefill_token_count == 3 * BLOCK
    assert_is_seen(driver, oracle)


def test_a_salt_that_is_not_in_the_key(driver, oracle, monkeypatch):
    """The KV would be right: what must not happen is the hit itself, so the account is what is compared."""
    monkeypatch.setattr(cache_keys, "root_hash", lambda fields: root_hash(fields[:3]))
    play(driver, cache_salt="other")
    assert driver.records[SECOND].skipped_prefill_token_count == 4 * BLOCK  # 0 is right, see test_caching_tenants.py
    assert_equals_oracle(driver, SECOND, oracle)


def test_a_salt_that_is_not_in_the_key_is_seen(get_caching_driver, monkeypatch):
    monkeypatch.setattr(cache_keys, "root_hash", lambda fields: root_hash(fields[:3]))
    with pytest.raises(AssertionError, match="request 1 matched 4, not 0 to 0"):
        play(get_caching_driver(max_tokens=60), cache_salt="other")


def test_resuming_one_token_too_far(driver, oracle, monkeypatch):
    """The KV of that token is never written."""
    resume = matching.resume_position
    monkeypatch.setattr(matching, "resume_position", lambda length, matched: resume(length, matched + (matched > 0)))
    monkeypatch.setattr(Scheduler, "_count_hit", lambda *_: None)  # it would fall over that token
    play(driver)
    assert_is_seen(driver, oracle)
    assert_equals_oracle(driver, FIRST, oracle)


def test_a_shared_block_that_is_overwritten(driver, oracle, monkeypatch):
    """A second user that overwrites a shared block is seen: the first one's next logits are wrong."""
    stage = driver.context.stage

    def stage_into_shared(message: ScheduledStep) -> None:
        stage(message)
        step = driver.context.step
        places, first = step.slot_mapping.clone(), 0
        for chunk in message.chunks:
            if chunk.request_id == SECOND and not chunk.is_decode:
                places[first : first + BLOCK] = chunk.block_ids[0] * BLOCK + places.new_tensor(range(BLOCK))
            first += chunk.length
        driver.context.step = dataclasses.replace(step, slot_mapping=places)

    driver.context.stage = stage_into_shared
    play(driver)
    assert_is_seen(driver, oracle, FIRST)


@pytest.mark.parametrize("block", [0, 3])
def test_a_shared_block_that_is_zeroed(driver, oracle, block):
    """Every shared block is read."""
    driver.add(FIRST, PROMPT, num_tokens_to_generate=1, skip_prompt_log_probs=True)
    driver.step()
    shared = driver.engine.get_request(FIRST).block_table[block]
    driver.run()
    driver.context.memory_buffer[:, :, shared] = 0.0
    driver.add(SECOND, PROMPT, skip_prompt_log_probs=True)
    driver.run()
    assert_equals_oracle(driver, FIRST, oracle)
    assert_is_seen(driver, oracle)
