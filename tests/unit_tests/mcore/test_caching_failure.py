"""EX-8, KV-5: aborts at every stage and forwards that raise, among requests that share blocks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from megatron_ext.scheduling.record import Status
from tests.priority import TestPriority
from tests.unit_tests.support.caching import BLOCK, POLICIES, Broken, CachingDriver, failing_forward
from tests.unit_tests.support.driver import assert_equals_oracle, make_prompt

pytestmark = pytest.mark.priority(TestPriority.HIGH)

PROMPT = make_prompt(4 * BLOCK + 5)
TURN = [*PROMPT[: 2 * BLOCK], *make_prompt(30, seed=1)]


def abort(driver: CachingDriver, request_id: int) -> None:
    """Abort the request: its own blocks are free at once; shared ones lose one reference each."""
    request = driver.engine.get_request(request_id)
    table, pool = list(request.block_table), driver.scheduler.blocks
    before = {block: pool.references(block) for block in table}
    cached = driver.scheduler.cache.use().blocks_cached
    driver.engine.abort_request(request_id)
    driver.engine.check()
    assert {block: pool.references(block) for block in table} == {block: n - 1 for block, n in before.items()}
    assert (request.block_table, request.sequence.running_slot) == ((), None)
    assert request_id not in driver.scheduler.pending_blocks.requests()
    assert driver.scheduler.cache.use().blocks_cached <= cached  # nothing half-computed was published


def finish(driver: CachingDriver, oracle: object, aborted: int, skipped: list[int]) -> None:
    driver.run()
    assert driver.records[aborted].status is Status.ABORTED
    others = sorted(set(driver.records) - {aborted})
    assert driver.skipped(*others) == skipped
    for request_id in others:
        assert_equals_oracle(driver, request_id, oracle)


@pytest.mark.parametrize("policy", POLICIES)
class TestAbort:
    """EX-8, stage by stage; the requests beside the aborted one share its prefix."""

    def test_waiting(self, get_caching_driver, oracle, policy):
        driver = get_caching_driver(policy=policy, max_requests=1)
        for request_id in range(3):
            driver.add(request_id, PROMPT)
        driver.step()
        abort(driver, 1)
        finish(driver, oracle, 1, [0, 64])  # what the other waited for is kept for it

    def test_follower(self, get_caching_driver, oracle, policy):
        driver = get_caching_driver(policy=policy)
        for request_id in range(3):
            driver.add(request_id, PROMPT)
        driver.step()
        assert driver.engine.get_request(1).timeline.has_waited_for_prefix
        abort(driver, 1)
        finish(driver, oracle, 1, [0, 64])

    def test_leader_in_mid_prefill(self, get_caching_driver, oracle, policy):
        """KV-6: the first follower takes over, from what the leader had completed if that is still there."""
        driver = get_caching_driver(policy=policy, max_tokens=40)
        for request_id in range(3):
            driver.add(request_id, PROMPT)
        driver.step()
        assert [r.request_id for r in driver.scheduler.queues.running] == [0]
        abort(driver, 0)
        finish(driver, oracle, 0, [32 if policy == "lru" else 0, 64])
        assert driver.records[0].computed_prefill_token_count == 40

    def test_mid_prefill_on_shared_blocks(self, get_caching_driver, oracle, policy):
        """Shared blocks stay unharmed with their owner; the blocks that the request began are gone."""
        driver = get_caching_driver(policy=policy, max_tokens=40)
        driver.add(0, PROMPT, num_tokens_to_generate=20)
        driver.step()
        driver.step()
        driver.add(1, [*PROMPT, *make_prompt(100, seed=1)])
        driver.step()
        assert driver.engine.get_request(1).computed_end == 64 + 39
        abort(driver, 1)
        driver.add(2, [*PROMPT, *make_prompt(100, seed=1)])
        finish(driver, oracle, 1, [0, 96 if policy == "lru" else 64])

    def test_decoding_owner_of_shared_blocks(self, get_caching_driver, oracle, policy):
        """The request that computed the blocks leaves; those that share them read on."""
        driver = get_caching_driver(policy=policy)
        driver.add(0, PROMPT, num_tokens_to_generate=40)
        driver.step()
        driver.add(1, PROMPT, num_tokens_to_generate=20)
        driver.step()
        driver.step()
        abort(driver, 0)
        driver.add(2, TURN)
        driver.add(3, make_prompt(70, seed=4))  # takes over what is free
        finish(driver, oracle, 0, [64, 32, 0])

    def test_paused(self, get_caching_driver, oracle, policy):
        driver = get_caching_driver(policy=policy, block_count=6)
        prompt = PROMPT[: 3 * BLOCK]
        driver.add(0, prompt, num_tokens_to_generate=20)
        driver.add(1, prompt, num_tokens_to_generate=20)
        driver.add(2, prompt[:20], num_tokens_to_generate=20)
        while not len(driver.scheduler.queues.paused):
            driver.step()
        assert [request.request_id for request in driver.scheduler.queues.paused] == [2]
        abort(driver, 2)
        finish(driver, oracle, 2, [0, 47])


def in_flight(driver: CachingDriver) -> CachingDriver:
    """Start requests: one decodes, one prefills on blocks of the first, one waits for the second, one is unrelated."""
    driver.add(0, PROMPT, num_tokens_to_generate=20)
    driver.step()
    driver.step()
    driver.add(1, [*PROMPT, *make_prompt(100, seed=1)])
    driver.add(2, [*PROMPT, *make_prompt(100, seed=1), 5])
    driver.add(3, make_prompt(30, seed=2))
    driver.step()
    assert [request.computed_end for request in driver.scheduler.queues.running] == [70, 103]
    return driver


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_forward_that_raises(get_caching_driver, oracle, policy, layer):
    """KV-5: a failed forward publishes and leaks nothing; earlier blocks are found, and all requests succeed."""
    driver = in_flight(get_caching_driver(policy=policy, max_tokens=40))
    lifetime, skipped = driver.engine.lifetime_prefill_token_count, driver.engine.lifetime_skipped_token_count
    with failing_forward(layer), pytest.raises(Broken):
        driver.step()
    driver.engine.check()
    assert driver.scheduler.cache.use().blocks_cached == (6 if policy == "lru" else 0)
    assert driver.free_blocks == driver.scheduler.blocks.total
    assert driver.scheduler.pending_blocks.requests() == set()
    assert [request.request_id for request in driver.scheduler.queues.waiting] == [0, 1, 2, 3]
    assert driver.engine.lifetime_prefill_token_count == lifetime
    assert driver.engine.lifetime_skipped_token_count == skipped
    driver.run()
    # The first finds its own blocks again, if they are kept; the second those, or the first one's after that.
    lru = policy == "lru"
    assert [driver.model.books[i].matched for i in range(4)] == [[0, 4 if lru else 0], [4, 6 if lru else 4], [10], [0]]
    assert driver.skipped(0, 1, 2, 3) == [0, 64, 160, 0]
    assert driver.records[0].recomputed_token_count == (70 - 64 if lru else 70)
    assert "ERROR_TRANSIENT" in driver.events(1)
    for request_id in range(4):
        assert_equals_oracle(driver, request_id, oracle)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_first_forward_that_raises(get_caching_driver, oracle, policy):
    """KV-5, KV-13: matched blocks are released, not harmed; hits of the same prompt are skipped tokens once."""
    driver = get_caching_driver(policy=policy)
    driver.add(0, PROMPT, num_tokens_to_generate=1)
    driver.run()
    driver.add(1, PROMPT)
    with failing_forward(), pytest.raises(Broken):
        driver.step()
    driver.engine.check()
    driver.add(2, TURN)
    driver.run()
    assert driver.skipped(0, 1, 2) == ([0, 64, 32] if policy == "lru" else [0, 0, 32])
    assert driver.records[1].recomputed_token_count == 0
    for request_id in range(3):
        assert_equals_oracle(driver, request_id, oracle)


@pytest.mark.parametrize("moment", ["stage", "sample"])
def test_failing_while_staging_or_again_and_again(get_caching_driver, oracle, monkeypatch, moment):
    """KV-5: the cache is unchanged by any error, however often."""
    driver = in_flight(get_caching_driver(max_tokens=40))
    cached = driver.scheduler.cache.use().blocks_cached
    target: Callable | str = {
        "stage": "megatron_ext.mcore.context.stage_step",
        "sample": "megatron_ext.mcore.controller.choose_tokens",  # the whole forward has succeeded
    }[moment]

    def fail(*_: object, **__: object) -> None:
        raise Broken

    with monkeypatch.context() as patch:
        patch.setattr(target, fail)
        for _ in range(3):
            with pytest.raises(Broken):
                driver.step()
            driver.engine.check()
            assert driver.scheduler.cache.use().blocks_cached == cached
    driver.run()
    assert driver.skipped(0, 1, 2, 3) == [0, 64, 160, 0]
    for request_id in range(4):
        assert_equals_oracle(driver, request_id, oracle)
