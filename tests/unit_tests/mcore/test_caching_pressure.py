"""KV-12, HY-5: too few blocks, too few slots: pinned blocks, pauses, evictions of requests, blocks and snapshots.

No request fails, stalls or changes its text for lack of a slot.
"""

from __future__ import annotations

import pytest

from megatron_ext.scheduling.record import Status
from tests.priority import TestPriority
from tests.unit_tests.support.caching import BLOCK, CachingDriver
from tests.unit_tests.support.driver import Driver, assert_equals_oracle, make_prompt
from tests.unit_tests.support.hybrid_caching import HybridDriver, build_driver

pytestmark = pytest.mark.priority(TestPriority.HIGH)

SYSTEM = [make_prompt(2 * BLOCK + 5, seed=seed) for seed in (1, 2)]


def assert_all_equal(driver: CachingDriver, oracle) -> None:
    for request_id, record in driver.records.items():
        if record.status is Status.COMPLETED:
            assert_equals_oracle(driver, request_id, oracle)


class TestThreeBlocks:
    """The smallest pools that can share anything."""

    def test_together(self, get_caching_driver, oracle):
        """Two that share one block need three in all; they run side by side, which they could not without sharing."""
        driver = get_caching_driver(block_count=3)
        prompt = make_prompt(BLOCK + 2)
        driver.add(0, prompt, num_tokens_to_generate=10)
        driver.add(1, [*prompt[:BLOCK], *make_prompt(3, seed=1)], num_tokens_to_generate=9)
        driver.add(2, prompt, num_tokens_to_generate=10)
        driver.step()
        driver.step()
        assert [chunk[0] for chunk in driver.steps[1]] == [0, 1]
        assert driver.free_blocks == 0
        driver.run()
        assert driver.skipped(0, 1, 2) == [0, BLOCK, BLOCK]
        assert_all_equal(driver, oracle)

    def test_a_cached_prompt_as_large_as_the_pool(self, get_caching_driver, oracle):
        """All three blocks are shared, and the one token that is computed is written to none of them."""
        driver = get_caching_driver(block_count=3, paused_buffer_size_gb=0)
        for request_id in range(2):
            driver.add(request_id, make_prompt(3 * BLOCK), num_tokens_to_generate=1)
            driver.run()
        assert driver.skipped(1) == [3 * BLOCK - 1]
        assert driver.writes.dropped == 2 * 2  # K and V of two layers
        assert_all_equal(driver, oracle)

    def test_outgrowing_the_pool_leaves_its_blocks_to_others(self, get_caching_driver, oracle):
        """The request ends by length; its computed blocks are right, so the next request may use them."""
        driver = get_caching_driver(block_count=3)
        driver.add(0, make_prompt(40), num_tokens_to_generate=20)
        driver.run()
        assert (driver.records[0].finish_reason, len(driver.records[0].generated_tokens)) == ("length", 9)
        driver.add(1, make_prompt(40), num_tokens_to_generate=8)
        driver.run()
        assert driver.skipped(1) == [32]
        assert_all_equal(driver, oracle)

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


def test_cached_blocks_are_evicted_before_a_request_waits(get_caching_driver, oracle):
    """KV-4: leaves first, oldest first, as many as are needed: the beginning of the old prompt is still there."""
    driver = get_caching_driver(block_count=6)
    old, new = make_prompt(4 * BLOCK), make_prompt(3 * BLOCK, seed=1)
    for request_id, prompt in enumerate((old, new, old, new)):
        driver.add(request_id, prompt, num_tokens_to_generate=1)
        driver.run()
        if request_id == 1:
            assert driver.scheduler.cache.use().blocks_evicted == 1
    assert driver.skipped(0, 1, 2, 3) == [0, 0, 3 * BLOCK, 2 * BLOCK]
    assert_all_equal(driver, oracle)


def test_a_match_is_pinned_before_others_are_evicted(get_caching_driver, oracle):
    """KV-3: the matched blocks are the oldest, and are not what makes room for the rest of the same request."""
    driver = get_caching_driver(block_count=4)
    old = make_prompt(2 * BLOCK)
    for request_id, prompt in enumerate((old, make_prompt(2 * BLOCK, seed=1), [*old, *make_prompt(20, seed=2)])):
        driver.add(request_id, prompt, num_tokens_to_generate=1)
        driver.run()
    assert driver.skipped(2) == [2 * BLOCK]
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


@pytest.mark.parametrize("params", [{"cache_salt": "a"}, {"enable_prefix_caching": False}])
def test_preemption_keeps_the_fields_of_a_request(get_caching_driver, oracle, params):
    """KV-10: salt, opt-out and the first token's time: another tenant's block is there, and is not matched."""
    driver = get_caching_driver(block_count=4, paused_buffer_size_gb=0)
    prompt = make_prompt(30)
    driver.add(0, prompt[:20], num_tokens_to_generate=30)
    driver.add(1, prompt, num_tokens_to_generate=20, **params)
    other = driver.engine.get_request(0)
    driver.step()
    while len(driver.matched[1]) < 2:
        was_there = driver.scheduler.cache.match(other.block_hashes[:1])
        driver.step()
    assert was_there
    driver.run()
    assert driver.events(1) == ["ADD_ENGINE", "ADD_CONTEXT", "FIRST_TOKEN", "EVICT", "ADD_CONTEXT", "FINISH"]
    assert driver.matched[1] == [0, 0]
    record = driver.records[1]
    assert record.ttft == record.events[2].timestamp - record.events[0].timestamp
    assert_all_equal(driver, oracle)


def test_paused_requests_keep_shared_blocks(get_caching_driver, oracle):
    """KV-12: shared blocks are counted once in the budget for paused requests, and stay unwritten."""
    driver = get_caching_driver(block_count=4)
    prompt = make_prompt(2 * BLOCK)
    for request_id, length in enumerate((32, 32, 20)):
        driver.add(request_id, prompt[:length], num_tokens_to_generate=20)
    driver.run()
    assert any("PAUSE" in driver.events(request_id) for request_id in range(3))
    assert driver.skipped(0, 1, 2) == [0, 2 * BLOCK - 1, BLOCK]
    assert_all_equal(driver, oracle)


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


@pytest.mark.parametrize(("slots", "max_tokens", "policy"), [(0, 400, "lru"), (1, 400, "ref_zero"), (2, 30, "lru")])
def test_few_slots_under_load(get_oracle, slots, max_tokens, policy):
    """HY-5: snapshots are in fact skipped and given up, and everything else is as it should be."""
    driver = build_driver(get_oracle, policy=policy, slots=slots, max_tokens=max_tokens, max_requests=6)
    load(driver)
    states = driver.states
    assert len(driver.records) == 12
    assert_all_equal(driver, get_oracle("hybrid"))
    assert driver.scheduler.cache.use().blocks_evicted == 0
    assert states.skipped > 0
    assert (states.evicted > 0) == (states.taken > 0) == (slots > 0)
    skipped = driver.engine.core.counters.skipped_tokens
    assert skipped > 0 if slots == 2 else slots == 1 or skipped == 0  # one slot may change hands too fast


@pytest.mark.long
@pytest.mark.parametrize(("slots", "policy"), [(1, "lru"), (3, "ref_zero")])
def test_few_blocks_and_few_slots(get_oracle, slots, policy):
    """HY-2: blocks are evicted with their snapshots, requests pause and are evicted, and all is equal."""
    driver = build_driver(get_oracle, policy=policy, slots=slots, block_count=11, max_tokens=50, max_requests=4)
    load(driver)
    assert_all_equal(driver, get_oracle("hybrid"))
    assert driver.states.evicted > 0
    assert driver.scheduler.cache.use().blocks_evicted > 0 or policy == "ref_zero"
    assert driver.scheduler.counters.pauses > 0
    assert driver.engine.core.counters.skipped_tokens > 0


def three(driver: HybridDriver) -> list[list[int]]:
    """Three prompts of one block and a token each, served one after the other: one snapshot each is wanted."""
    prompts = [make_prompt(BLOCK + 1, seed=seed) for seed in range(3)]
    for request_id, prompt in enumerate(prompts):
        driver.sight(request_id, prompt)
    return prompts


class TestVictims:
    """HY-5: the snapshot consumed longest ago gives up its slot; never consumed counts from when it was taken."""

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

    def test_a_slot_that_is_restored_and_written_in_one_step(self, get_oracle):
        """The only slot is read, and then written; its first owner's next sighting computes all."""
        driver = build_driver(get_oracle, slots=1)
        prompt = make_prompt(BLOCK + 1)
        longer = [*prompt, *make_prompt(BLOCK, seed=1)]
        driver.sight(0, prompt)
        assert driver.sight(1, longer) == 16
        assert driver.snapshots_of(longer) == [32]
        assert driver.sight(2, prompt) == 0
        assert_all_equal(driver, get_oracle("hybrid"))

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

    def test_a_request_that_cannot_enter_takes_no_turn(self, get_oracle):
        """Neither pins nor slots nor the snapshot's age are touched by a request that waits for a running slot."""
        driver = build_driver(get_oracle, slots=2, max_requests=1)
        one, two, last = (make_prompt(BLOCK + 1, seed=seed) for seed in range(3))
        driver.sight(0, one)
        driver.sight(1, two)
        driver.add(2, last, num_tokens_to_generate=10)
        driver.add(3, one)  # would resume from the older snapshot
        driver.step()
        assert (driver.snapshots_of(one), driver.snapshots_of(two)) == ([], [16])
        driver.run()
        assert driver.skipped(3) == [0]
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


def test_nothing_is_evicted_while_slots_are_free(get_oracle):
    """HY-5: a snapshot that goes with its block, or gives way to the next of its own request, was not wanted for."""
    driver = build_driver(get_oracle)
    for request_id in range(3):
        driver.sight(request_id, make_prompt(20, seed=request_id), num_tokens_to_generate=45)
    assert driver.states.taken > 3
    assert (driver.states.evicted, driver.states.replaced) == (0, 3 * 2)
    assert driver.scheduler.cache.use().slots_used == 3 * 2
