"""KV-6: one of several requests with an uncached prefix in common computes it; the others wait, and then hit."""

from __future__ import annotations

import pytest

from megatron_ext.scheduling.record import Status
from tests.priority import TestPriority
from tests.unit_tests.support.caching import BLOCK, POLICIES, Broken, CachingDriver, failing_forward
from tests.unit_tests.support.driver import assert_equals_expected, assert_equals_oracle, make_prompt, what_it_gave

pytestmark = pytest.mark.priority(TestPriority.HIGH)

PROMPT = make_prompt(6 * BLOCK)
ALIKE = [[*PROMPT, *make_prompt(5, seed=seed)] for seed in range(3)]
STEPS = [pytest.param({"max_tokens": 40}, id="chunked"), pytest.param({"max_tokens": 400}, id="whole")]


def order_of_admission(driver: CachingDriver) -> list[int]:
    """Ids by the step in which their first tokens were computed."""
    return list(dict.fromkeys(request_id for step in driver.steps for request_id, _, _ in step))


def assert_all_equal(driver: CachingDriver, oracle: object) -> None:
    for request_id, record in driver.records.items():
        if record.status is Status.COMPLETED:
            assert_equals_oracle(driver, request_id, oracle)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("batching", STEPS)
class TestLeaders:
    """Leaders, with and without chunks."""

    def test_one_computes_and_the_others_hit(self, get_driver, get_caching_driver, oracle, policy, batching):
        """Equal to the cache being off, request by request."""
        on, off = get_caching_driver(policy=policy, **batching), get_driver("attention_only", **batching)
        for driver in (on, off):
            for request_id, prompt in enumerate(ALIKE):
                driver.add(request_id, prompt)
            driver.run()
        assert on.skipped(0, 1, 2) == [0, 96, 96]
        assert on.scheduler.counters.coordination_waits == 2
        assert on.engine.lifetime_prefill_token_count == 101 + 5 + 5
        for request_id in range(3):
            assert_equals_expected(on, request_id, what_it_gave(off, request_id))

    def test_unrelated_requests_overtake(self, get_caching_driver, oracle, policy, batching):
        """Each follower is counted once, however long it waits; in chunks, the last one never has to wait."""
        driver = get_caching_driver(policy=policy, **batching)
        driver.add(0, ALIKE[0])
        driver.add(1, ALIKE[1])
        driver.add(2, make_prompt(40, seed=4))
        driver.add(3, ALIKE[2][:20])
        driver.run()
        assert order_of_admission(driver) == [0, 2, 1, 3]
        assert driver.skipped(0, 1, 2, 3) == [0, 96, 0, 16]
        assert driver.scheduler.counters.coordination_waits == (1 if batching["max_tokens"] == 40 else 2)
        assert_all_equal(driver, oracle)

    def test_an_aborted_leader(self, get_caching_driver, oracle, policy, batching):
        """The first follower leads."""
        driver = get_caching_driver(policy=policy, **batching)
        for request_id, prompt in enumerate(ALIKE):
            driver.add(request_id, prompt)
        plan = driver.scheduler.schedule()  # admitted, and gone before anything is computed
        assert [deferral.wait_for for deferral in plan.deferrals] == [0, 0]
        driver.scheduler.abandon(plan.chunks, "given up")
        driver.engine.abort_request(0)
        driver.run()
        assert driver.records[0].status is Status.ABORTED
        assert driver.skipped(1, 2) == [0, 96]
        assert_all_equal(driver, oracle)

    def test_a_failing_leader(self, get_caching_driver, oracle, policy, batching):
        """The failing leader is the oldest request, so it leads again."""
        driver = get_caching_driver(policy=policy, **batching)
        for request_id, prompt in enumerate(ALIKE):
            driver.add(request_id, prompt)
        for _ in range(2):
            with failing_forward(), pytest.raises(Broken):
                driver.step()
        driver.run()
        assert order_of_admission(driver) == [0, 1, 2]
        assert driver.skipped(0, 1, 2) == [0, 96, 96]
        assert driver.scheduler.counters.coordination_waits == 2
        assert_all_equal(driver, oracle)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_leader_aborted_in_mid_prefill(get_caching_driver, oracle, policy):
    """The successor begins where the leader stopped, if its published blocks are kept, and leads the rest."""
    driver = get_caching_driver(policy=policy, max_tokens=40)
    for request_id, prompt in enumerate(ALIKE):
        driver.add(request_id, prompt)
    driver.step()
    driver.step()
    driver.engine.abort_request(0)
    driver.step()
    assert driver.steps[-1] == (((1, 80, 101),) if policy == "lru" else ((1, 0, 40),))
    driver.run()
    assert driver.skipped(1, 2) == [80 if policy == "lru" else 0, 96]
    assert_all_equal(driver, oracle)


def test_overtaking_under_chunked_prefill(get_caching_driver, oracle):
    """A leader's last chunk leaves room: the unrelated request takes it, though it came last."""
    driver = get_caching_driver(max_tokens=60)
    driver.add(0, ALIKE[0])
    driver.add(1, ALIKE[1])
    driver.add(2, make_prompt(10, seed=4))
    driver.run()
    assert [[chunk[0] for chunk in step] for step in driver.steps[:3]] == [[0], [0, 2], [0, 2, 1]]
    assert_all_equal(driver, oracle)


def test_a_chain_of_leaders(get_caching_driver, oracle):
    """Each request follows the one before it a bit further; no block is computed twice."""
    driver = get_caching_driver()
    one, two, three = ([*PROMPT[: 2 * i * BLOCK], *make_prompt(40, seed=i)] for i in (1, 2, 3))
    driver.add(0, one)
    driver.add(1, two)
    driver.add(2, three)
    driver.run()
    assert order_of_admission(driver) == [0, 1, 2]
    assert driver.skipped(0, 1, 2) == [0, 32, 64]
    assert_all_equal(driver, oracle)


def test_who_wants_prompt_log_probs_leads_and_never_follows(get_caching_driver, oracle):
    """EX-5: the request computes everything itself and waits for no leader; its blocks serve others."""
    driver = get_caching_driver()
    driver.add(0, ALIKE[0], skip_prompt_log_probs=False)
    driver.add(1, ALIKE[0], skip_prompt_log_probs=False)
    driver.add(2, ALIKE[1])
    driver.run()
    assert [sorted(chunk[0] for chunk in step) for step in driver.steps[:2]] == [[0, 1], [0, 1, 2]]
    assert driver.skipped(0, 1, 2) == [0, 0, 96]
    assert driver.scheduler.counters.coordination_waits == 1
    assert_all_equal(driver, oracle)


@pytest.mark.parametrize("params", [{"enable_prefix_caching": False}, {"cache_salt": "b"}])
def test_strangers_do_not_follow(get_caching_driver, oracle, params):
    """KV-9, EX-3: a request that may not read the leader's blocks does not wait for them."""
    driver = get_caching_driver()
    driver.add(0, ALIKE[0], cache_salt="a")
    driver.add(1, ALIKE[0], **params)
    driver.add(2, ALIKE[0], cache_salt="a")
    driver.run()
    assert [chunk[0] for chunk in driver.steps[0]] == [0, 1]
    assert driver.skipped(0, 1, 2) == [0, 0, 96]
    assert driver.scheduler.counters.coordination_waits == 1
    assert_all_equal(driver, oracle)


def test_a_refused_leader_is_nobodys_leader(get_caching_driver, oracle):
    """KV-6, KV-13: a request that waits for room computes nothing; its followers wait for room too, and hit later."""
    driver = get_caching_driver(block_count=8)
    driver.add(0, make_prompt(40, seed=4), num_tokens_to_generate=12)
    driver.step()
    driver.add(1, ALIKE[0])
    driver.add(2, ALIKE[1])
    driver.step()
    assert driver.scheduler.pending_blocks.requests() == set()
    assert driver.scheduler.counters.coordination_waits == 0
    driver.run()
    assert driver.skipped(0, 1, 2) == [0, 0, 96]
    assert driver.scheduler.counters.coordination_waits == 1
    assert_all_equal(driver, oracle)
