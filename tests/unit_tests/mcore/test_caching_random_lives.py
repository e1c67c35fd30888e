"""Requests that share prefixes, in any order of events, in tiny pools: all equal the oracle, and all is accounted for.

`CachingDriver` checks matches, skips, leaders, accounts and KV writes in every step.
"""

from __future__ import annotations

import contextlib
import random

import pytest

from megatron_ext.scheduling.record import Status
from tests.priority import TestPriority
from tests.unit_tests.support.caching import BLOCK, POLICIES, Broken, CachingDriver, failing_forward
from tests.unit_tests.support.driver import assert_equals_oracle, few_prefills, make_prompt

pytestmark = pytest.mark.priority(TestPriority.HIGH)

ROOT = make_prompt(6 * BLOCK)


class Life:
    """Random additions, steps, aborts, suspensions, failures and resets of one engine."""

    def __init__(self, driver: CachingDriver, source: random.Random) -> None:
        self.driver, self.source = driver, source
        self.added = 0

    def add(self) -> None:
        """A beginning of one text, most often with an end that few others have; or the next turn of a chat."""
        choose = self.source.choice
        prompt = ROOT[: choose([15, 16, 17, 31, 32, 33, 48, 50])]
        if self.source.random() < 0.6:
            prompt = [*prompt, *make_prompt(choose([1, 2, 14, 17]), seed=choose([1, 2]))]
        answered = [r for r in self.driver.records.values() if r.status is Status.COMPLETED]
        if answered and self.source.random() < 0.3:
            record = choose(answered)
            prompt = [*record.prompt_tokens, *record.generated_tokens, 7][:70]
        self.driver.add(
            self.added,
            prompt,
            num_tokens_to_generate=self.source.randint(1, 20),
            cache_salt=choose([None] * 6 + ["a"]),
            enable_prefix_caching=self.source.random() < 0.9,
            skip_prompt_log_probs=self.source.random() < 0.9,
        )
        self.added += 1

    def step(self) -> None:
        self.driver.step()

    def abort(self) -> None:
        living = [request.request_id for request in self.driver.scheduler.queues]
        if living:
            self.driver.engine.abort_request(self.source.choice(living))
            self.driver.engine.check()

    def suspend(self) -> None:
        self.driver.engine.suspend()
        self.driver.engine.check()
        if self.source.random() < 0.5:
            self.add()
        self.driver.engine.resume()

    def forget(self) -> None:
        self.source.choice([self.driver.engine.reset_prefix_cache, self.driver.engine.weights_changed])()
        self.driver.engine.check()

    def fail(self) -> None:
        with failing_forward(self.source.choice([0, 1])), contextlib.suppress(Broken):
            self.driver.step()
        self.driver.engine.check()

    def live(self, actions: int) -> None:
        weights = {self.add: 8, self.step: 20, self.abort: 0.7, self.fail: 1, self.suspend: 0.4, self.forget: 0.4}
        for action in self.source.choices(list(weights), list(weights.values()), k=actions):
            action()
        self.driver.run()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", [5, 12, 59])  # lives with evictions, pauses, failures
def test_random_lives(get_caching_driver, oracle, monkeypatch, seed, policy):
    """KV-2 to KV-6, KV-13, EX-1 to EX-5, EX-8."""
    source = random.Random(seed)
    max_requests = source.choice([2, 4, 6])
    driver = get_caching_driver(
        policy=policy,
        block_count=source.choice([5, 6, 8, 14]),
        max_requests=max_requests,
        max_tokens=max_requests + source.choice([5, 30, 70]),
        paused_buffer_size_gb=source.choice([None, None, 0]),
        token_rounder=source.choice([1, 8]),
        **few_prefills(monkeypatch, are_few=(seed == 12) is (policy == "lru")),
    )
    life = Life(driver, source)
    life.live(70)
    assert len(driver.records) == life.added
    for request_id, record in driver.records.items():
        assert record.status is not Status.FAILED or "too small" in record.error or "cannot be served" in record.error
        if record.status is Status.COMPLETED:
            assert_equals_oracle(driver, request_id, oracle)
    assert driver.engine.lifetime_skipped_token_count > 3 * BLOCK
