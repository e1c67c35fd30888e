"""HY-5: too few slots, too few blocks. No request fails, stalls or changes its text for lack of a slot."""

from __future__ import annotations

import pytest

from tests.priority import TestPriority
from tests.unit_tests.support.caching import BLOCK
from tests.unit_tests.support.driver import Driver, assert_equals_oracle, make_prompt
from tests.unit_tests.support.hybrid_caching import HybridDriver, build_driver

pytestmark = pytest.mark.priority(TestPriority.HIGH)

SYSTEM = [make_prompt(2 * BLOCK + 5, seed=seed) for seed in (1, 2)]


def load(driver: Driver) -> None:
    """Three waves of prompts that begin alike in twos, some of them aligned; the last wave repeats the first."""
    waves = []
    for wave in range(2):
        lengths = (4, 11, 27, 45)  # 48 + ...: 11 and 27 make aligned prompts
        waves.append([[*SYSTEM[i % 2], *make_prompt(n, seed=10 * wave + i)] for i, n in enumerate(lengths)])
    waves.append(waves[0])
    for wave, prompts in enumerate(waves):
        for i, prompt in enumerate(prompts):
            driver.add(10 * wave + i, prompt, num_tokens_to_generate=5 + 12 * (i == 2))
        for _ in range(2):
            driver.step()
    driver.run()


@pytest.mark.parametrize(
    ("slots", "max_tokens", "policy"),
    [(0, 30, "lru"), (0, 400, "ref_zero"), (1, 30, "ref_zero"), (1, 400, "lru"), (2, 30, "lru"), (2, 400, "ref_zero")],
)
def test_few_slots_under_load(get_oracle, slots, max_tokens, policy):
    """HY-5: snapshots are in fact skipped and given up, and everything else is as it should be."""
    driver = build_driver(get_oracle, policy=policy, slots=slots, max_tokens=max_tokens, max_requests=6)
    load(driver)
    states = driver.states
    assert len(driver.records) == 12
    for request_id in driver.records:
        assert_equals_oracle(driver, request_id, get_oracle("hybrid"))
    assert driver.scheduler.cache.use().blocks_evicted == 0
    assert states.skipped > 0
    assert (states.evicted > 0) == (states.taken > 0) == (slots > 0)
    skipped = driver.engine.lifetime_skipped_token_count
    assert skipped > 0 if slots == 2 else slots == 1 or skipped == 0  # one slot may change hands too fast


@pytest.mark.parametrize(("slots", "policy"), [(1, "lru"), (3, "lru"), (3, "ref_zero"), (3, "flops")])
def test_few_blocks_and_few_slots(get_oracle, slots, policy):
    """HY-2: blocks are evicted with their snapshots, requests pause and are evicted, and all is equal."""
    driver = build_driver(
        get_oracle, policy=policy, slots=slots, is_exact=False, block_count=11, max_tokens=50, max_requests=4
    )
    load(driver)
    for request_id in driver.records:
        assert_equals_oracle(driver, request_id, get_oracle("hybrid"))
    assert driver.states.evicted > 0
    assert driver.scheduler.cache.use().blocks_evicted > 0 or policy == "ref_zero"
    assert driver.scheduler.counters.pauses > 0
    assert driver.engine.lifetime_skipped_token_count > 0


def test_a_pool_of_three_blocks(get_oracle):
    """KV-12: a prompt of two blocks and its answer have the pool for themselves, again and again."""
    driver = build_driver(get_oracle, slots=2, is_exact=False, block_count=3)
    prompt = make_prompt(2 * BLOCK + 1)
    assert driver.sight(0, prompt, num_tokens_to_generate=15) == 0
    assert driver.sight(1, prompt, num_tokens_to_generate=15) == 2 * BLOCK
    assert driver.sight(2, make_prompt(40, seed=1)) == 0
    assert driver.sight(3, prompt) == 0
    assert driver.scheduler.cache.use().blocks_evicted > 0
    for request_id in range(4):
        assert_equals_oracle(driver, request_id, get_oracle("hybrid"))


def three(driver: HybridDriver) -> list[list[int]]:
    """Three prompts of one block and a token each, served one after the other: one snapshot each is wanted."""
    prompts = [make_prompt(BLOCK + 1, seed=seed) for seed in range(3)]
    for request_id, prompt in enumerate(prompts):
        driver.sight(request_id, prompt)
    return prompts


class TestWhoGivesUpItsSlot:
    """HY-5: the one consumed longest ago; never consumed counts from when it was taken."""

    def test_never_consumed(self, get_oracle):
        driver = build_driver(get_oracle, slots=2)
        one, two, last = three(driver)
        assert [driver.snapshots_of(prompt) for prompt in (one, two, last)] == [[], [16], [16]]
        assert [driver.sight(3 + i, prompt) for i, prompt in enumerate((two, last))] == [16, 16]
        assert driver.sight(5, one) == 0  # its block is cached, its snapshot is not

    def test_consumed(self, get_oracle):
        driver = build_driver(get_oracle, slots=3)
        one, two, last = three(driver)
        driver.sight(3, one)
        driver.sight(4, make_prompt(BLOCK + 1, seed=3))
        assert [driver.snapshots_of(prompt) for prompt in (one, two, last)] == [[16], [], [16]]
        assert driver.sight(5, one) == 16
        assert_equals_oracle(driver, 5, get_oracle("hybrid"))

    def test_what_is_restored_in_the_same_step(self, get_oracle):
        """The only slot is read, and then written, in one step; its first owner's next sighting computes all."""
        driver = build_driver(get_oracle, slots=1)
        prompt = make_prompt(BLOCK + 1)
        longer = [*prompt, *make_prompt(BLOCK, seed=1)]
        driver.sight(0, prompt)
        assert driver.sight(1, longer) == 16
        assert driver.snapshots_of(longer) == [32]
        assert driver.sight(2, prompt) == 0
        for request_id in range(3):
            assert_equals_oracle(driver, request_id, get_oracle("hybrid"))

    def test_two_restored_from_slots_that_others_take(self, get_oracle):
        """Two requests consume snapshots whose slots their own snapshots take, crosswise, in one step."""
        driver = build_driver(get_oracle, slots=2)
        one, two = (make_prompt(BLOCK + 1, seed=seed) for seed in (0, 1))
        driver.sight(0, one)
        driver.sight(1, two)
        driver.add(2, [*two, *make_prompt(BLOCK, seed=2)])
        driver.add(3, [*one, *make_prompt(BLOCK, seed=3)])
        driver.run()
        assert driver.skipped(2, 3) == [16, 16]
        assert driver.states.evicted == 2
        for request_id in (2, 3):
            assert_equals_oracle(driver, request_id, get_oracle("hybrid"))


def test_a_snapshot_evicted_before_its_block(get_oracle):
    """HY-2, HY-3: the match is longer than what can be resumed from; the rest is computed, and shared all the same."""
    driver = build_driver(get_oracle, slots=2)
    prompt = make_prompt(4 * BLOCK + 2)
    driver.sight(0, prompt[: BLOCK + 1])
    driver.sight(1, prompt)
    driver.sight(2, prompt[: BLOCK + 1])  # its snapshot is now the one to be kept
    driver.sight(3, make_prompt(BLOCK + 1, seed=1))
    assert driver.snapshots_of(prompt) == [16]
    blocks = driver.scheduler.cache.use().blocks_cached
    assert driver.sight(4, prompt) == 16
    record = driver.records[4]
    assert record.matched_block_count == 4
    assert record.prefill_reasons == {"no_snapshot": 48, "partial_block": 2}
    assert driver.writes.dropped >= 48
    assert driver.scheduler.cache.use().blocks_cached == blocks
    assert driver.sight(5, prompt) == 64  # its owner left it again
    for request_id in (4, 5):
        assert_equals_oracle(driver, request_id, get_oracle("hybrid"))


@pytest.mark.parametrize("policy", ["lru", "ref_zero"])
def test_nothing_is_evicted_while_slots_are_free(get_oracle, policy):
    """HY-5: a snapshot that goes with its block, or gives way to the next of its own request, was not wanted for."""
    driver = build_driver(get_oracle, policy=policy)
    for request_id in range(3):
        driver.sight(request_id, make_prompt(20, seed=request_id), num_tokens_to_generate=45)
    assert driver.states.taken > 3
    assert (driver.states.evicted, driver.states.replaced) == (0, 3 * 2)
    assert driver.scheduler.cache.use().slots_used == (0 if policy == "ref_zero" else 3 * 2)
