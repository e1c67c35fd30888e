"""SP-3, SP-5: random events with drafts, in any order: requests that end well equal the oracle."""

from __future__ import annotations

import random

import pytest

from tests.priority import TestPriority
from tests.unit_tests.mcore.test_snapshots_random_lives import Life, check_life
from tests.unit_tests.support.drafters import Knowing, any_token, caching, nonsense, right_for_a_while, wrong
from tests.unit_tests.support.driver import Driver, assert_equals_oracle, make_prompt

pytestmark = pytest.mark.priority(TestPriority.HIGH)

KINDS = ["hybrid", "gated_delta_net", "attention_only", "mamba1"]


class Prophet(Knowing):
    """Drafter that knows the oracle's tokens, which it computes when a request is new."""

    def __init__(self, oracle, driver_of, answer, seed: int) -> None:
        super().__init__(answer, seed)
        self._oracle, self._driver_of = oracle, driver_of

    def propose(self, asks):
        for ask in asks:
            if ask.request_id not in self.truth:
                request = self._driver_of().engine.get_request(ask.request_id)
                count = request.params.num_tokens_to_generate
                self.truth[ask.request_id] = (*request.prompt_tokens, *self._greedy(request.prompt_tokens, count))
        return super().propose(asks)

    def _greedy(self, prompt, count: int):
        return self._oracle.greedy(prompt, count).tokens


def life_of(get_driver, get_oracle, kind: str, source: random.Random, answer, **settings: object) -> Life:
    drivers: list[Driver] = []
    drafter = Prophet(get_oracle(kind), lambda: drivers[0], answer, source.randint(0, 99))
    drivers.append(get_driver(kind, drafter=drafter, **settings))
    return Life(drivers[0], source)


@pytest.mark.parametrize("seed", range(4))
def test_random_lives(get_driver, get_oracle, seed):
    """Pauses, preemptions, aborts, suspensions, failing steps, resets; few blocks, slots and tokens."""
    source = random.Random(f"drafts {seed}")
    kind, mode = KINDS[seed % len(KINDS)], ["kernel", "align", None][seed % 3]
    max_requests = source.choice([2, 3, 4])
    life = life_of(
        get_driver,
        get_oracle,
        kind,
        source,
        [right_for_a_while, any_token, nonsense][seed % 3],
        cache=caching(mode, source.choice([1, 3, 20])),
        speculative_tokens=source.choice([1, 3, 7]),
        block_count=source.choice([8, 10, 14]),
        max_requests=max_requests,
        max_tokens=max(16, max_requests + source.choice([0, 2, 5, 40])),
        paused_buffer_size_gb=source.choice([None, None, 0]),
        token_rounder=source.choice([1, 8]),
    )
    life.live(60)
    counters = life.driver.scheduler.counters
    assert counters.drafted > 10
    check_life(life, get_oracle(kind))


def test_a_paused_request_keeps_the_state_that_it_goes_on_from(get_driver, get_oracle):
    """The request returned the block of a rejected draft, and an older request needed that block for a token."""
    drafter, oracle = Knowing(wrong), get_oracle("hybrid")
    settings = {"cache": caching("kernel", 1), "speculative_tokens": 1, "block_count": 3}
    driver = get_driver("hybrid", drafter=drafter, **settings)
    for name in range(2):
        driver.add(name, make_prompt(12, name), num_tokens_to_generate=11)
    drafter.truth[1] = (*make_prompt(12, 1), *oracle.greedy(make_prompt(12, 1), 11).tokens)
    kept = []
    while driver.engine.has_unfinished_requests():
        driver.step()
        kept += [request.sequence.draft_states for request in driver.scheduler.queues.paused]
    driver.run()
    assert kept
    assert all([one.position for one in states] == [16] for states in kept)
    for name in range(2):
        assert_equals_oracle(driver, name, oracle)


def test_a_drafter_costs_its_drafts_only(get_driver, get_oracle, caplog):
    """An error or invalid drafts are counted each time, logged once of each kind, and have no other effect."""
    life = life_of(
        get_driver,
        get_oracle,
        "attention_only",
        random.Random(1),
        nonsense,
        speculative_tokens=3,
    )
    for _ in range(4):
        life.add()
    life.driver.run()
    check_life(life, get_oracle("attention_only"))
    said = [record.getMessage() for record in caplog.records if "the drafter failed" in record.getMessage()]
    assert len(said) == 2, "once for what it raises, once for what it answers"
    assert life.driver.engine.error_isolation.count > len(said)
