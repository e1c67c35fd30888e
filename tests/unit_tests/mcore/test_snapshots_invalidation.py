"""EX-4, FX-1: operations that empty the cache empty both indexes; all others leave both unchanged."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.priority import TestPriority
from tests.unit_tests.support.caching import BLOCK, POLICIES
from tests.unit_tests.support.driver import assert_equals_oracle, make_prompt
from tests.unit_tests.support.hybrid_caching import HybridDriver, build_driver
from tests.unit_tests.support.models import HYBRID, build_slow_decay
from tests.unit_tests.support.oracle import Oracle

pytestmark = pytest.mark.priority(TestPriority.HIGH)

PROMPT = make_prompt(4 * BLOCK + 5)
LONG = [*PROMPT, *make_prompt(61, seed=1)]


def restart(driver: HybridDriver) -> None:
    driver.engine.suspend()
    driver.engine.check()
    driver.engine.resume()


FORGET: dict[str, Callable[[HybridDriver], None]] = {
    "reset_prefix_cache": lambda driver: driver.engine.reset_prefix_cache(),
    "weights_changed": lambda driver: driver.engine.weights_changed(),
    "suspend_and_resume": restart,
}


@pytest.fixture(params=FORGET)
def forget(request) -> Callable[[HybridDriver], None]:
    return FORGET[request.param]


@pytest.fixture
def oracle(get_oracle):
    return get_oracle("hybrid")


def assert_empty(driver: HybridDriver) -> None:
    driver.engine.check()
    use = driver.scheduler.cache.use()
    assert (use.blocks_cached, use.slots_used) == (0, 0)
    assert driver.states.obtainable_count == driver.states.total


def test_nothing_cached_before_is_used_after(get_oracle, oracle, forget):
    """Section 9 A 3: a resumed engine has no stale snapshots."""
    driver = build_driver(get_oracle)
    driver.sight(0, PROMPT)
    assert driver.sight(1, PROMPT) == 64
    forget(driver)
    assert_empty(driver)
    assert driver.sight(2, PROMPT) == 0
    assert driver.records[2].matched_block_count == 0
    assert driver.sight(3, PROMPT) == 64
    for request_id in range(4):
        assert_equals_oracle(driver, request_id, oracle)


def test_with_requests_at_every_stage(get_oracle, oracle, forget):
    """The requests decode, prefill after a resume with a reserved slot, or wait for that slot."""
    driver = build_driver(get_oracle, max_tokens=40)
    driver.add(0, PROMPT, num_tokens_to_generate=30)
    for _ in range(2):
        driver.step()
    driver.add(1, LONG)
    driver.add(2, [*LONG, 5])
    driver.step()
    assert driver.engine.get_request(1).computed_end == 64 + 39
    assert [one.position for one in driver.engine.get_request(1).sequence.snapshots] == [128]
    forget(driver)
    assert_empty(driver)
    driver.run()
    assert driver.skipped(0, 1) == [0, 64]
    assert driver.sight(3, LONG) == 128
    for request_id in range(4):
        assert_equals_oracle(driver, request_id, oracle)


def test_requests_in_flight_publish_nothing(get_oracle, oracle):
    """Neither blocks nor snapshots are published, in prefill or in decode; their states are outdated."""
    driver = build_driver(get_oracle, max_tokens=40)
    driver.add(0, make_prompt(20), num_tokens_to_generate=40)
    driver.add(1, LONG, num_tokens_to_generate=30)
    driver.step()
    driver.engine.reset_prefix_cache()
    while driver.engine.has_unfinished_requests():
        driver.step()
        assert_empty(driver)
    driver.run()
    for request_id in (0, 1):
        assert_equals_oracle(driver, request_id, oracle)


def test_other_weights(forget):
    """Outputs and states are those of the new weights, though all tokens are the same."""
    oracle = Oracle(build_slow_decay(HYBRID))
    driver = HybridDriver(oracle.model, HYBRID)
    driver.sight(0, PROMPT)
    old = driver.records[0].generated_tokens
    oracle.model.load_state_dict(build_slow_decay(HYBRID, seed=6).state_dict())
    forget(driver)
    assert driver.sight(1, PROMPT) == 0
    assert driver.sight(2, PROMPT) == 64
    assert driver.records[2].generated_tokens != old
    for request_id in (1, 2):
        assert_equals_oracle(driver, request_id, oracle)


@pytest.mark.parametrize("kind", ["hybrid", "attention_free"])
def test_suspend_frees_both_pools(get_oracle, kind):
    """A suspended engine has no tensor of either pool left."""
    driver = build_driver(get_oracle, kind)
    driver.sight(0, PROMPT)
    driver.engine.suspend()
    context = driver.context
    assert context.pools is None
    assert_empty(driver)
    driver.engine.resume()
    assert context.snapshots.conv.shape[1] == driver.states.total
    assert driver.sight(1, PROMPT) == 0
    assert driver.sight(2, PROMPT) == 64
    assert_equals_oracle(driver, 2, get_oracle(kind))


def test_an_engine_that_is_reset(get_oracle, oracle):
    driver = build_driver(get_oracle)
    driver.sight(0, PROMPT)
    driver.engine.reset()
    driver.watch_scheduler()
    driver.records.clear()
    driver.seen.clear()
    assert_empty(driver)
    assert driver.sight(1, PROMPT) == 0
    assert driver.sight(2, PROMPT) == 64
    assert_equals_oracle(driver, 2, oracle)


class TestIdleDummyStep:
    """FX-1: the branch that resets the context in the base is forced."""

    @pytest.mark.parametrize("policy", POLICIES)
    def test_between_requests_and_among_them(self, get_oracle, policy):
        driver, oracle = build_driver(get_oracle, "experts", policy=policy, max_tokens=40), get_oracle("experts")
        driver.context.cuda_graph_batch_dimensions_list = [object()]

        def idle() -> None:
            before = (driver.engine.prefix_cache_statistics(), driver.engine.lifetime_prefill_token_count)
            content = [pool.clone() for pool in (driver.context.snapshots.conv, driver.context.snapshots.ssm)]
            driver.engine.controller.dummy_forward()
            driver.engine.check()
            assert (driver.engine.prefix_cache_statistics(), driver.engine.lifetime_prefill_token_count) == before
            for pool, old in zip((driver.context.snapshots.conv, driver.context.snapshots.ssm), content, strict=True):
                assert pool.allclose(old, equal_nan=True)

        driver.add(0, PROMPT, num_tokens_to_generate=20)
        for _ in range(3):
            idle()
            driver.step()
        driver.add(1, LONG)
        driver.add(2, [*LONG, 5])
        for _ in range(3):
            driver.step()
            idle()
        driver.run()
        idle()
        assert driver.skipped(0, 1, 2) == [0, 64, 128]
        assert driver.sight(3, LONG) == (128 if policy == "lru" else 0)
        for request_id in range(4):
            assert_equals_oracle(driver, request_id, oracle)
