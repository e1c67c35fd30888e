"""Random events with snapshots, in any order: requests that end well equal the oracle; nothing is lost.

`HybridDriver` compares every admission and snapshot with token lists meanwhile.
"""

from __future__ import annotations

import contextlib
import random

import pytest

from megatron_ext.scheduling.record import Status
from tests.priority import TestPriority
from tests.unit_tests.support.caching import BLOCK, Broken
from tests.unit_tests.support.driver import assert_equals_oracle, few_prefills, make_prompt
from tests.unit_tests.support.hybrid_caching import PLENTY, HybridDriver, build_driver, failing_scan
from tests.unit_tests.support.oracle import Oracle

pytestmark = pytest.mark.priority(TestPriority.HIGH)


class Life:
    """Random additions, turns of chats, steps, aborts, suspensions, failures and resets of one engine."""

    def __init__(self, driver: HybridDriver, source: random.Random) -> None:
        self.driver, self.source = driver, source
        self.added = 0
        self.stems = [make_prompt(48, seed=seed) for seed in range(2)]

    def _add(self, prompt: list[int]) -> None:
        choose = self.source.choice
        self.driver.add(
            self.added,
            prompt[:90],
            num_tokens_to_generate=self.source.randint(1, 20),
            skip_prompt_log_probs=choose([True, True, True, True, False]),
            enable_prefix_caching=choose([True, True, True, True, False]),
            cache_salt=choose([None, None, None, None, "other"]),
        )
        self.added += 1

    def add(self) -> None:
        stem = self.source.choice(self.stems)[: self.source.choice([15, 16, 17, 32, 33, 47, 48])]
        self._add([*stem, *make_prompt(self.source.choice([0, 0, 1, 2, 16, 30]), seed=self.source.randint(0, 3))])

    def turn(self) -> None:
        """Continue something that was said before."""
        records = list(self.driver.records.values())
        if records:
            record = self.source.choice(records)
            self._add([*record.prompt_tokens, *record.generated_tokens, *make_prompt(3, seed=self.added)])

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
        self.driver.engine.resume()

    def forget(self) -> None:
        self.source.choice([self.driver.engine.reset_prefix_cache, self.driver.engine.weights_changed])()
        self.driver.engine.check()

    def fail(self) -> None:
        with failing_scan(self.source.randint(0, 3)), contextlib.suppress(Broken):
            self.driver.step()
        self.driver.engine.check()

    def live(self, actions: int) -> None:
        weights = {self.add: 5, self.turn: 2, self.step: 16, self.abort: 1, self.fail: 1}
        weights |= {self.suspend: 0.3, self.forget: 0.3}
        for action in self.source.choices(list(weights), list(weights.values()), k=actions):
            action()
        self.driver.run()


@pytest.mark.parametrize("seed", range(3))
def test_random_lives_with_a_budget_of_a_block(get_oracle, seed):
    """LA-1, LA-5: chunks of `align` mode end inside blocks, beside decodes; of several kinds of recurrent layers."""
    source = random.Random(f"align {seed}")
    max_requests = source.choice([2, 4, 6])
    slots = source.choice([PLENTY, 2, 4])
    blocks = source.choice([200, 200, 12])
    kind = ["hybrid", "gated_delta_net", "mamba1"][seed]
    driver = build_driver(
        get_oracle,
        kind,
        policy=source.choice(["lru", "lru", "ref_zero"]),
        slots=slots,
        is_exact=blocks == 200 and slots == PLENTY,
        mode="align",
        block_count=blocks,
        max_requests=max_requests,
        max_tokens=BLOCK + source.choice([0, 0, 1, 3]),
    )
    life = Life(driver, source)
    life.live(60)
    check_life(life, get_oracle(kind))
    prefills = [
        chunk
        for request_id, record in driver.records.items()
        for chunk in driver.seen[request_id].chunks
        if chunk[1] < record.prompt_token_count
    ]
    assert any(end % BLOCK for _, end in prefills), "no chunk ended inside a block"


@pytest.mark.parametrize("seed", range(4))
def test_random_lives(get_oracle, monkeypatch, seed):
    source = random.Random(seed)
    slots = source.choice([PLENTY, PLENTY, 0, 1, 2, 4])
    blocks = source.choice([200, 200, 6, 12])
    max_requests = source.choice([1, 2, 4])
    kind = source.choice(["hybrid", "hybrid", "attention_free"])
    driver = build_driver(
        get_oracle,
        kind,
        policy=source.choice(["lru", "lru", "ref_zero"]),
        slots=slots,
        is_exact=blocks == 200 and slots in (0, PLENTY),
        block_count=blocks,
        max_requests=max_requests,
        max_tokens=max_requests + source.choice([0, 1, 2, 15, 40, 200]),
        paused_buffer_size_gb=source.choice([None, None, 0]),
        token_rounder=source.choice([1, 8]),
        **few_prefills(monkeypatch, are_few=seed % 2 == 1),
    )
    life = Life(driver, source)
    life.live(60)
    assert (driver.states.taken > 0) is (slots > 0), "a life without snapshots proves nothing about them"
    check_life(life, get_oracle(kind))


def check_life(life: Life, oracle: Oracle) -> None:
    """Check that all requests have ended, with the oracle's outputs."""
    driver = life.driver
    assert len(driver.records) == life.added
    for request_id, record in driver.records.items():
        if record.status is Status.COMPLETED:
            assert_equals_oracle(driver, request_id, oracle)
        else:
            tokens = record.generated_tokens
            expected = oracle.greedy(record.prompt_tokens, max(1, len(tokens))).tokens
            assert tokens == expected[: len(tokens)]
            assert (record.error is None) == (record.status is Status.ABORTED)
