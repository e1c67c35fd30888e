"""SI-1: opportunistic checkpoints hold the right states, and resuming from them gives equal logits."""

from __future__ import annotations

import pytest

from megatron_ext.errors import ConfigError
from tests.unit_tests.support.caching import BLOCK, Broken
from tests.unit_tests.support.driver import assert_equals_oracle, make_prompt
from tests.unit_tests.support.hybrid_caching import assert_snapshots_equal_oracle, build_driver, failing_scan

SYSTEM = make_prompt(9 * BLOCK + 7)


@pytest.fixture
def oracle(get_oracle):
    return get_oracle("hybrid")


def prompts(count: int) -> list[list[int]]:
    return [[*SYSTEM, *make_prompt(40 + seed, seed=seed)] for seed in range(count)]


@pytest.mark.parametrize("budget", [400, 64, 37])
def test_the_second_sighting_is_right(get_oracle, oracle, budget: int):
    """Cut in three ways; states against a token-by-token recurrence, logits against the whole prompt computed."""
    driver = build_driver(get_oracle, max_tokens=budget)
    asked = prompts(3)
    assert [driver.sight(i, prompt) for i, prompt in enumerate(asked)] == [0, 8 * BLOCK, 9 * BLOCK]
    assert driver.snapshots_of(asked[0], opportunistic=True) == [4 * BLOCK]
    for request_id, prompt in enumerate(asked):
        assert_snapshots_equal_oracle(driver, prompt, oracle)
        assert_equals_oracle(driver, request_id, oracle)
    use = driver.scheduler.cache.use()
    assert (use.provisional_taken, use.provisional_consumed) == (2, 1)


def test_other_states_would_be_seen(get_oracle, oracle):
    """Resuming reads the content of the slot."""
    driver = build_driver(get_oracle)
    first, second = prompts(2)
    driver.sight(0, first)
    slot = driver.slot_of(SYSTEM[: 8 * BLOCK])
    driver.context.snapshots.ssm[:, slot] += 0.5
    assert driver.sight(1, second) == 8 * BLOCK
    with pytest.raises(AssertionError):
        assert_equals_oracle(driver, 1, oracle)


def test_with_few_slots_the_others_keep_theirs(get_oracle, oracle):
    """Two slots: the end of the prompt has one, a guess the other, and it goes first."""
    driver = build_driver(get_oracle, slots=2)
    first, second = prompts(2)
    driver.sight(0, first, num_tokens_to_generate=1)
    assert driver.snapshots_of(first) == [11 * BLOCK]
    assert driver.snapshots_of(first, opportunistic=True) == [6 * BLOCK]
    driver.sight(1, make_prompt(20, seed=9), num_tokens_to_generate=1)
    assert driver.snapshots_of(first) == [11 * BLOCK]
    assert driver.snapshots_of(first, opportunistic=True) == []
    driver.sight(2, second)
    for request_id in range(3):
        assert_equals_oracle(driver, request_id, oracle)


def test_a_checkpoint(get_oracle, oracle):
    driver = build_driver(get_oracle)
    first, second = prompts(2)
    driver.sight(0, first, cache_checkpoint=(len(SYSTEM),))
    assert driver.sight(1, second) == 9 * BLOCK
    assert_snapshots_equal_oracle(driver, first, oracle)
    for request_id in range(2):
        assert_equals_oracle(driver, request_id, oracle)


def test_a_checkpoint_at_the_end_of_the_prompt(get_oracle, oracle):
    """The end of the prompt is one of the request's positions; the next boundary is not."""
    driver = build_driver(get_oracle)
    prompt = SYSTEM[: 4 * BLOCK]
    driver.sight(0, prompt, cache_checkpoint=(len(prompt),))
    assert driver.sight(1, [*prompt, 3]) == 4 * BLOCK
    assert_equals_oracle(driver, 1, oracle)
    with pytest.raises(ConfigError, match=f"cache_checkpoint {len(prompt) + 1} must be at most the {len(prompt)} "):
        driver.add(2, prompt, cache_checkpoint=(len(prompt) + 1,))


def test_a_failed_step_shows_none(get_oracle, oracle):
    """HY-6: no snapshot is visible after a failed step, though some layers had written theirs."""
    driver = build_driver(get_oracle)
    first, second = prompts(2)
    driver.add(0, first)
    with failing_scan(), pytest.raises(Broken):
        driver.step()
    assert driver.scheduler.cache.use().provisional_taken == 0
    driver.run()
    assert driver.sight(1, second) == 8 * BLOCK
    for request_id in range(2):
        assert_equals_oracle(driver, request_id, oracle)
