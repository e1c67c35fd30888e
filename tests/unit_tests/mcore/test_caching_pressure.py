"""KV-12, HY-5: too few blocks, too few slots: pinned blocks, pauses, evictions of requests, blocks and snapshots.

No request fails, stalls or changes its text for lack of a slot.
"""

from __future__ import annotations

import pytest

from megatron_ext.scheduling.record import Status
from tests.unit_tests.support.caching import BLOCK, CachingDriver
from tests.unit_tests.support.driver import assert_equals_oracle, make_prompt
from tests.unit_tests.support.hybrid_caching import build_driver


def assert_all_equal(driver: CachingDriver, oracle) -> None:
    for request_id, record in driver.records.items():
        if record.status is Status.COMPLETED:
            assert_equals_oracle(driver, request_id, oracle)


class TestThreeBlocks:
    """The smallest pools that can share anything."""

    def test_with_states(self, get_oracle):
        """KV-12: a prompt of two blocks and its answer have the pool for themselves, again and again."""
        driver = build_driver(get_oracle, slots=2, block_count=3)
        prompt = make_prompt(2 * BLOCK + 1)
        assert driver.sight(0, prompt, num_tokens_to_generate=15) == 0
        assert driver.sight(1, prompt, num_tokens_to_generate=15) == 2 * BLOCK
        assert driver.sight(2, make_prompt(40, seed=1)) == 0
        assert driver.sight(3, prompt) == 0
        assert driver.scheduler.cache.use().blocks_evicted > 0
        assert_all_equal(driver, get_oracle("hybrid"))


def test_a_pool_full_of_pinned_blocks(get_caching_driver, oracle):
    """KV-3, KV-4: blocks in use are not evicted; a request that shares enough is admitted, others wait."""
    driver = get_caching_driver(block_count=5)
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
    assert driver.engine.get_request(2).block_table == ()
    driver.run()
    assert driver.skipped(1, 2) == [4 * BLOCK - 1, BLOCK]
    assert_all_equal(driver, oracle)


@pytest.mark.parametrize("policy", ["lru", "ref_zero"])
def test_preempted_and_resumed(get_caching_driver, oracle, policy):
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
    assert [driver.matched[i] for i in range(3)] == [[0, 3 if lru else 0], [1], [1, 1]]
    assert [driver.records[i].recomputed_token_count for i in range(3)] == [0 if lru else 3 * BLOCK, 0, BLOCK]
    assert_all_equal(driver, oracle)


class TestVictims:
    """HY-5: the snapshot consumed longest ago gives up its slot; never consumed counts from when it was taken."""

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
        assert_all_equal(driver, get_oracle("hybrid"))


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
    assert_all_equal(driver, get_oracle("hybrid"))


def test_blocks_that_are_computed_again_are_not_written(get_oracle):
    """KV-3: tokens computed again for lack of states leave the shared blocks as they are, beside other readers."""
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
    assert_all_equal(driver, get_oracle("hybrid"))
