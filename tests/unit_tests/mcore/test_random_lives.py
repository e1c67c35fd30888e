"""Random events in any order: requests that end well equal the oracle, and nothing is lost or leaked."""

from __future__ import annotations

import contextlib
import random

import pytest

from megatron_ext.ops.ssd import SSD
from megatron_ext.scheduling.record import Status
from tests.priority import TestPriority
from tests.unit_tests.support.driver import Driver, assert_equals_oracle, make_prompt

pytestmark = pytest.mark.priority(TestPriority.HIGH)


class Broken(RuntimeError):
    """Error that a failing forward raises."""


class Life:
    """Random additions, steps, aborts, suspensions and failures of one engine."""

    def __init__(self, driver: Driver, source: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
        self.driver, self.source, self.monkeypatch = driver, source, monkeypatch
        self.added = 0

    def add(self) -> None:
        length = self.source.choice([1, 2, 3, 15, 16, 17, 30, 50])
        self.driver.add(self.added, make_prompt(length), num_tokens_to_generate=self.source.randint(1, 24))
        self.added += 1

    def step(self) -> None:
        self.driver.step()

    def abort(self) -> None:
        living = [request.request_id for request in self.driver.scheduler.queues]
        if living:
            self.driver.engine.abort_request(self.source.choice(living))

    def suspend(self) -> None:
        self.driver.engine.suspend()
        self.driver.engine.check()
        if self.source.random() < 0.5:
            self.add()
        self.driver.engine.resume()

    def fail(self) -> None:
        """Run a step whose second recurrent layer raises."""
        calls = iter(range(1000))

        def break_second(operator: object) -> object:
            def call(*args: object, **kwargs: object) -> object:
                if next(calls) == 1:
                    raise Broken
                return operator(*args, **kwargs)

            return call

        with self.monkeypatch.context() as patch:
            for name in ("prefill", "decode"):
                patch.setattr(SSD, name, break_second(getattr(SSD, name)))
            with contextlib.suppress(Broken):
                self.driver.step()
        self.driver.engine.check()

    def live(self, actions: int) -> None:
        weights = {self.add: 4, self.step: 14, self.abort: 1, self.suspend: 1, self.fail: 1}
        for action in self.source.choices(list(weights), list(weights.values()), k=actions):
            action()
        self.driver.run()


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kind", ["hybrid", "attention_only"])
def test_random_lives(get_driver, get_oracle, monkeypatch, kind, seed):
    source = random.Random(seed)
    max_requests = source.choice([1, 2, 4])
    driver = get_driver(
        kind,
        block_count=source.choice([3, 4, 6, 12]),
        max_requests=max_requests,
        max_tokens=max_requests + source.choice([0, 1, 2, 5, 40]),
        paused_buffer_size_gb=source.choice([None, None, 0]),
        token_rounder=source.choice([1, 8]),
    )
    life = Life(driver, source, monkeypatch)
    life.live(60)
    assert len(driver.records) == life.added
    for request_id, record in driver.records.items():
        if record.status is Status.COMPLETED:
            assert_equals_oracle(driver, request_id, get_oracle(kind))
        else:
            tokens = record.generated_tokens
            assert tokens == get_oracle(kind).greedy(record.prompt_tokens, max(1, len(tokens))).tokens[: len(tokens)]
            assert (record.error is None) == (record.status is Status.ABORTED)


def test_a_reset_forgets_the_requests_in_flight(get_driver, get_oracle):
    driver = get_driver(max_tokens=40, max_requests=3)
    futures = [driver.add(request_id, make_prompt(length)) for request_id, length in enumerate((5, 129, 64, 3))]
    for _ in range(2):
        driver.step()
    driver.engine.reset()
    driver.watch_scheduler()
    driver.engine.check()
    assert all(future.cancelled() for future in futures)
    assert not driver.engine.has_unfinished_requests()
    assert driver.free_blocks == driver.scheduler.blocks.total
    assert (driver.engine.lifetime_prefill_token_count, driver.engine.step_count) == (0, 0)
    driver.seen.clear()
    for request_id, length in enumerate((129, 5)):
        driver.add(request_id, make_prompt(length))
    driver.run()
    for request_id in range(2):
        assert_equals_oracle(driver, request_id, get_oracle("hybrid"))


def test_two_engines_share_a_model(get_driver, get_oracle):
    """A model knows nothing of the engines around it."""
    drivers = [get_driver(max_tokens=40), get_driver(block_size=64, max_tokens=70)]
    for seed, driver in enumerate(drivers):
        driver.add(0, make_prompt(100, seed))
    while any(driver.engine.has_unfinished_requests() for driver in drivers):
        for driver in drivers:
            driver.step()
    for driver in drivers:
        assert_equals_oracle(driver, 0, get_oracle("hybrid"))
