"""KV-6 with recurrent layers: followers wait only for a leader that will leave a snapshot for them."""

from __future__ import annotations

import pytest

from megatron_ext.scheduling.record import Status
from tests.unit_tests.support.caching import BLOCK, Broken
from tests.unit_tests.support.driver import assert_equals_oracle, make_prompt
from tests.unit_tests.support.hybrid_caching import (
    HybridDriver,
    assert_snapshots_equal_oracle,
    build_driver,
    failing_scan,
)

SYSTEM = make_prompt(4 * BLOCK + 5)  # four blocks in common
ALIKE = [[*SYSTEM, *make_prompt(40, seed=seed)] for seed in range(4)]  # of 109 tokens
COMMON, LAST = 64, 96
STEPS = [pytest.param({"max_tokens": 30}, id="chunked"), pytest.param({"max_tokens": 400}, id="whole")]


def add_all(driver: HybridDriver, count: int = 3) -> None:
    for request_id, prompt in enumerate(ALIKE[:count]):
        driver.add(request_id, prompt)


def waits(driver: HybridDriver) -> int:
    return driver.scheduler.counters.coordination_waits


def assert_all_equal(driver: HybridDriver, get_oracle) -> None:
    for request_id, record in driver.records.items():
        if record.status is Status.COMPLETED:
            assert_equals_oracle(driver, request_id, get_oracle("hybrid"))


@pytest.mark.parametrize("batching", STEPS)
class TestLeaders:
    """Leaders, with and without chunks."""

    def test_followers_resume_at_the_common_prefix(self, get_oracle, batching):
        """The leader leaves a snapshot there beside its own."""
        driver = build_driver(get_oracle, **batching)
        add_all(driver)
        driver.run()
        assert driver.skipped(0, 1, 2) == [0, COMMON, COMMON]
        assert waits(driver) == 2
        snapshots = assert_snapshots_equal_oracle(driver, ALIKE[0], get_oracle("hybrid"))
        assert snapshots == [COMMON, LAST]
        assert driver.engine.lifetime_prefill_token_count == 109 + 2 * (109 - COMMON)
        assert_all_equal(driver, get_oracle)

    def test_each_follower_has_its_own_common_prefix(self, get_oracle, batching):
        """Three wishes, three snapshots in the leader's one prefill, two of them in one slot's life."""
        driver = build_driver(get_oracle, **batching)
        driver.add(0, ALIKE[0])
        for request_id, length in ((1, 20), (2, 37), (3, 64), (4, 65)):
            driver.add(request_id, ALIKE[0][:length])
        driver.run()
        assert driver.skipped(*range(5)) == [0, 16, 32, 48, 64]
        assert waits(driver) == 4
        snapshots = assert_snapshots_equal_oracle(driver, ALIKE[0], get_oracle("hybrid"))
        assert snapshots == [16, 32, 48, 64, LAST]
        assert_all_equal(driver, get_oracle)

    def test_with_no_slots_nobody_waits(self, get_oracle, batching):
        driver = build_driver(get_oracle, slots=0, **batching)
        add_all(driver)
        driver.run()
        assert driver.skipped(0, 1, 2) == [0, 0, 0]
        assert waits(driver) == 0
        first_steps = [next(i for i, s in enumerate(driver.steps) if r in [c[0] for c in s]) for r in range(3)]
        assert first_steps == ([0, 3, 7] if batching["max_tokens"] == 30 else [0, 0, 0])
        assert_all_equal(driver, get_oracle)

    def test_one_slot_serves_all_who_wish_for_the_same(self, get_oracle, batching):
        """A request for another snapshot finds no slot, and does not wait."""
        driver = build_driver(get_oracle, slots=1, **batching)
        add_all(driver)
        driver.add(3, ALIKE[0][:37])
        driver.step()
        assert waits(driver) == 2
        assert (3 in [c[0] for c in driver.steps[0]]) == (batching["max_tokens"] == 400)
        driver.run()
        assert driver.skipped(1) == [COMMON]
        assert_all_equal(driver, get_oracle)

    def test_an_aborted_leader(self, get_oracle, batching):
        """The leader's reservation is returned; the first follower leads, and takes the snapshot for the second."""
        driver = build_driver(get_oracle, **batching)
        add_all(driver)
        plan = driver.scheduler.schedule()
        assert [deferral.snapshot.position for deferral in plan.deferrals] == [COMMON, COMMON]
        driver.scheduler.abandon(plan.chunks, "given up")
        driver.engine.check()
        assert driver.states.obtainable_count == driver.states.total
        driver.engine.abort_request(0)
        driver.run()
        assert driver.skipped(1, 2) == [0, COMMON]
        assert_all_equal(driver, get_oracle)

    def test_a_failing_leader(self, get_oracle, batching):
        """The oldest request leads again; states of the failed forward are in no visible slot."""
        driver = build_driver(get_oracle, **batching)
        add_all(driver)
        for call in (0, 1):
            with failing_scan(call), pytest.raises(Broken):
                driver.step()
            driver.engine.check()
            assert (driver.states.used_count, driver.states.obtainable_count) == (0, driver.states.total)
        driver.run()
        assert driver.skipped(0, 1, 2) == [0, COMMON, COMMON]
        assert_all_equal(driver, get_oracle)


@pytest.mark.parametrize("computed", [30, 60, 90])
def test_a_leader_aborted_in_mid_prefill(get_oracle, computed):
    """The successor shares the blocks that the leader left, and resumes only at a snapshot."""
    driver = build_driver(get_oracle, max_tokens=30)
    add_all(driver)
    while driver.engine.get_request(0).computed_end < computed:
        driver.step()
    reserved = driver.states.total - driver.states.obtainable_count
    assert reserved == (computed < COMMON)
    driver.engine.abort_request(0)
    driver.engine.check()
    assert driver.states.obtainable_count == driver.states.total
    driver.run()
    assert driver.records[1].matched_block_count == min(computed // BLOCK, COMMON // BLOCK)
    assert driver.skipped(1, 2) == ([COMMON, COMMON] if computed == 90 else [0, COMMON])
    assert_all_equal(driver, get_oracle)


def test_nobody_waits_for_what_the_leader_has_passed(get_oracle):
    """The leader computes blocks that the other needs, but its states there are gone."""
    driver = build_driver(get_oracle, max_tokens=80)
    driver.add(0, ALIKE[0])
    driver.step()
    assert driver.engine.get_request(0).computed_end == 80
    driver.add(1, [*ALIKE[0][:105], 5, 6])  # 96 in common: it waits
    driver.add(2, [*ALIKE[0][:90], 5])  # 80 in common, and 80 computed: it does not
    driver.step()
    assert [chunk[0] for chunk in driver.steps[-1]] == [0, 2]
    assert waits(driver) == 1
    driver.run()
    assert driver.skipped(1, 2) == [96, 64]  # SI-1: where no states were requested
    assert_all_equal(driver, get_oracle)


def test_unrelated_requests_overtake(get_oracle):
    driver = build_driver(get_oracle)
    add_all(driver, 2)
    driver.add(2, make_prompt(40, seed=9))
    driver.step()
    assert [chunk[0] for chunk in driver.steps[0]] == [0, 2]
    driver.run()
    assert driver.skipped(0, 1, 2) == [0, COMMON, 0]
    assert_all_equal(driver, get_oracle)


def test_a_snapshot_that_is_given_up_before_the_follower_comes(get_oracle):
    """The follower waited in vain, and computes; it neither fails nor stalls."""
    driver = build_driver(get_oracle, slots=1, max_requests=1, max_tokens=400)
    add_all(driver, 2)
    driver.step()
    assert (waits(driver), driver.states.used_count) == (1, 1)
    driver.forget(ALIKE[0], [COMMON])
    driver.run()
    assert driver.skipped(1) == [0]
    assert driver.records[1].matched_block_count == 4
    assert_all_equal(driver, get_oracle)


def test_who_wants_prompt_log_probs_never_follows(get_oracle):
    """EX-5: the request computes everything, beside the leader; others wait for the leader's snapshot."""
    driver = build_driver(get_oracle)
    driver.add(0, ALIKE[0])
    driver.add(1, ALIKE[0], skip_prompt_log_probs=False)
    driver.add(2, ALIKE[1])
    driver.step()
    assert [chunk[0] for chunk in driver.steps[0]] == [0, 1]
    driver.run()
    assert driver.skipped(0, 1, 2) == [0, 0, COMMON]
    assert_all_equal(driver, get_oracle)
