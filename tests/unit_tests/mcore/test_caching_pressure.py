"""KV-12: small pools, pools full of pinned blocks, pauses, evictions of requests and of cached blocks, suspensions."""

from __future__ import annotations

import pytest

from megatron_ext.scheduling.record import Status
from tests.priority import TestPriority
from tests.unit_tests.support.caching import BLOCK, POLICIES
from tests.unit_tests.support.driver import assert_equals_oracle, make_prompt

pytestmark = pytest.mark.priority(TestPriority.HIGH)


@pytest.mark.parametrize("policy", POLICIES)
class TestThreeBlocks:
    """The smallest pools that can share anything."""

    def test_together(self, get_caching_driver, oracle, policy):
        """Two that share one block need three in all; they run side by side, which they could not without sharing."""
        driver = get_caching_driver(policy=policy, block_count=3)
        prompt = make_prompt(BLOCK + 2)
        driver.add(0, prompt, num_tokens_to_generate=10)
        driver.add(1, [*prompt[:BLOCK], *make_prompt(3, seed=1)], num_tokens_to_generate=9)
        driver.add(2, prompt, num_tokens_to_generate=10)
        driver.step()
        driver.step()
        assert [chunk[0] for chunk in driver.steps[1]] == [0, 1]
        assert driver.free_blocks == 0
        driver.run()
        assert driver.skipped(0, 1) == [0, BLOCK]
        assert driver.skipped(2) == [BLOCK]  # it waited for that block, so it was kept for it
        for request_id in range(3):
            assert_equals_oracle(driver, request_id, oracle)

    def test_a_cached_prompt_as_large_as_the_pool(self, get_caching_driver, oracle, policy):
        """All three blocks are shared, and the one token that is computed is written to none of them."""
        driver = get_caching_driver(policy=policy, block_count=3, paused_buffer_size_gb=0)
        for request_id in range(2):
            driver.add(request_id, make_prompt(3 * BLOCK), num_tokens_to_generate=1)
            driver.run()
        assert driver.skipped(1) == [3 * BLOCK - 1 if policy == "lru" else 0]
        assert driver.writes.dropped == (2 * 2 if policy == "lru" else 0)  # K and V of two layers
        for request_id in range(2):
            assert_equals_oracle(driver, request_id, oracle)

    def test_outgrowing_the_pool_leaves_its_blocks_to_others(self, get_caching_driver, oracle, policy):
        """The request fails alone; its computed blocks are right, so the next request may use them."""
        driver = get_caching_driver(policy=policy, block_count=3)
        driver.add(0, make_prompt(40), num_tokens_to_generate=20)
        while driver.engine.has_unfinished_requests():
            driver.step()
        assert driver.records[0].status is Status.FAILED
        driver.add(1, make_prompt(40), num_tokens_to_generate=8)
        driver.run()
        assert driver.skipped(1) == [32 if policy == "lru" else 0]
        assert_equals_oracle(driver, 1, oracle)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_pool_full_of_pinned_blocks(get_caching_driver, oracle, policy):
    """KV-3, KV-4: blocks in use are not evicted; a request that shares enough is admitted, others wait."""
    driver = get_caching_driver(policy=policy, block_count=5)
    prompt = make_prompt(4 * BLOCK)
    driver.add(0, prompt, num_tokens_to_generate=12)
    driver.step()
    driver.step()
    assert driver.free_blocks == 0
    use = driver.scheduler.cache.use()
    driver.add(1, prompt, num_tokens_to_generate=1)  # needs no block of its own
    driver.add(2, [*prompt[:BLOCK], *make_prompt(5, seed=1)], num_tokens_to_generate=2)  # needs one
    driver.step()
    assert driver.scheduler.cache.use() == use
    assert driver.events(1) == ["ADD_ENGINE", "ADD_CONTEXT", "FIRST_TOKEN", "FINISH"]
    assert [request.request_id for request in driver.scheduler.queues.waiting] == [2]
    waiting = driver.engine.get_request(2)
    assert (waiting.sequence.ledger.matched_blocks, waiting.sequence.ledger.skipped, waiting.block_table) == (
        None,
        0,
        (),
    )
    driver.run()
    assert driver.skipped(1, 2) == [4 * BLOCK - 1, BLOCK if policy == "lru" else 0]
    for request_id in range(3):
        assert_equals_oracle(driver, request_id, oracle)


def test_cached_blocks_are_evicted_before_a_request_waits(get_caching_driver, oracle):
    """KV-4: leaves first, oldest first, as many as are needed: the beginning of the old prompt is still there."""
    driver = get_caching_driver(block_count=6)
    old, new = make_prompt(4 * BLOCK), make_prompt(3 * BLOCK, seed=1)
    driver.add(0, old, num_tokens_to_generate=1)
    driver.run()
    driver.add(1, new, num_tokens_to_generate=1)
    driver.run()
    assert driver.scheduler.cache.use().blocks_evicted == 1
    driver.add(2, old, num_tokens_to_generate=1)  # its fourth block takes the place of the other's last
    driver.run()
    driver.add(3, new, num_tokens_to_generate=1)
    driver.run()
    assert driver.skipped(0, 1, 2, 3) == [0, 0, 3 * BLOCK, 2 * BLOCK]
    for request_id in range(4):
        assert_equals_oracle(driver, request_id, oracle)


def test_a_match_is_pinned_before_others_are_evicted(get_caching_driver, oracle):
    """KV-3: the matched blocks are the oldest, and are not what makes room for the rest of the same request."""
    driver = get_caching_driver(block_count=4)
    old = make_prompt(2 * BLOCK)
    driver.add(0, old, num_tokens_to_generate=1)
    driver.run()
    driver.add(1, make_prompt(2 * BLOCK, seed=1), num_tokens_to_generate=1)
    driver.run()
    assert driver.scheduler.cache.use().blocks_evictable == 4
    driver.add(2, [*old, *make_prompt(20, seed=2)], num_tokens_to_generate=1)
    driver.run()
    assert driver.skipped(2) == [2 * BLOCK]
    assert_equals_oracle(driver, 2, oracle)


@pytest.mark.parametrize("policy", POLICIES)
def test_evicted_and_resumed(get_caching_driver, oracle, policy):
    """KV-10, EX-2: a resumed request finds the rest of its blocks, and each prompt token is counted once.

    With "ref_zero" the oldest finds nothing: the requests that shared its first block have ended by then.
    """
    driver = get_caching_driver(policy=policy, block_count=6, paused_buffer_size_gb=0)
    shared = make_prompt(BLOCK)
    driver.add(0, [*shared, *make_prompt(BLOCK - 2, seed=1)], num_tokens_to_generate=30)
    driver.add(1, [*shared, *make_prompt(BLOCK, seed=2)], num_tokens_to_generate=30)
    driver.add(2, [*shared, *make_prompt(2, seed=3)], num_tokens_to_generate=30)
    driver.run()
    assert [driver.events(i).count("EVICT") for i in range(3)] == [1, 0, 1]
    assert driver.skipped(0, 1, 2) == [0, BLOCK, BLOCK]
    lru = policy == "lru"
    assert [driver.model.books[i].matched for i in range(3)] == [[0, 3 if lru else 0], [1], [1, 1]]
    assert [driver.records[i].recomputed_token_count for i in range(3)] == [0 if lru else 3 * BLOCK, 0, BLOCK]
    for request_id in range(3):
        assert_equals_oracle(driver, request_id, oracle)


def test_evicted_with_a_budget_for_paused_requests(get_caching_driver, oracle):
    """KV-12: a paused request keeps shared blocks too; they are counted once, and stay unwritten."""
    driver = get_caching_driver(block_count=4)
    prompt = make_prompt(2 * BLOCK)
    driver.add(0, prompt, num_tokens_to_generate=20)
    driver.add(1, prompt, num_tokens_to_generate=20)
    driver.add(2, prompt[:20], num_tokens_to_generate=20)
    driver.run()
    assert any("PAUSE" in driver.events(request_id) for request_id in range(3))
    assert driver.skipped(0, 1, 2) == [0, 2 * BLOCK - 1, BLOCK]
    for request_id in range(3):
        assert_equals_oracle(driver, request_id, oracle)


@pytest.mark.parametrize("policy", POLICIES)
def test_suspended_and_resumed(get_caching_driver, oracle, policy):
    """KV-10: the pools' contents are gone, so nothing of before is matched; the followers follow again."""
    driver = get_caching_driver(policy=policy, max_tokens=40)
    prompt = make_prompt(100)
    for request_id in range(3):
        driver.add(request_id, prompt, cache_salt="a")
    for _ in range(4):
        driver.step()
    assert driver.scheduler.cache.use().blocks_cached == 6
    driver.engine.suspend()
    driver.engine.check()
    assert driver.scheduler.cache.use().blocks_cached == 0
    driver.engine.resume()
    driver.add(3, prompt, cache_salt="a")
    driver.run()
    assert driver.skipped(0, 1, 2, 3) == [0, 96, 96, 96]
    assert [driver.model.books[i].matched for i in range(4)] == [[0, 0], [6, 6], [6, 6], [6]]
    assert driver.records[0].recomputed_token_count > 100
    for request_id in range(4):
        assert_equals_oracle(driver, request_id, oracle)
