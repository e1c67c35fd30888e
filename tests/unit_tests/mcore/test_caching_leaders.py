"""KV-6: one of several requests with an uncached prefix in common computes it; the others wait, and then hit.

With recurrent layers they wait only for a leader that will leave a snapshot for them. Which requests lead and follow:
scheduling/prefix_wait/test_prefix_leaders.py.
"""

from __future__ import annotations

import pytest

from megatron_ext.scheduling.record import Status
from tests.on_request import long_except
from tests.priority import TestPriority
from tests.unit_tests.support.caching import BLOCK, Broken, CachingDriver, failing_forward
from tests.unit_tests.support.driver import assert_equals_oracle, make_prompt
from tests.unit_tests.support.hybrid_caching import assert_snapshots_equal_oracle, build_driver, failing_scan

pytestmark = pytest.mark.priority(TestPriority.HIGH)

SYSTEM = make_prompt(4 * BLOCK + 5)  # four blocks in common
ALIKE = [[*SYSTEM, *make_prompt(40, seed=seed)] for seed in range(4)]  # of 109 tokens
COMMON, LAST = 64, 96
FAILING = {"attention_only": failing_forward, "hybrid": failing_scan}
CASES = [("attention_only", 30), ("attention_only", 400), ("hybrid", 30), ("hybrid", 400)]  # in chunks, and whole


def add_all(driver: CachingDriver, count: int = 3) -> None:
    for request_id, prompt in enumerate(ALIKE[:count]):
        driver.add(request_id, prompt)


def waits(driver: CachingDriver) -> int:
    return driver.scheduler.counters.coordination_waits


def admitted(driver: CachingDriver, step: int) -> list[int]:
    """Requests that a step computes tokens of."""
    return [request_id for request_id, _, _ in driver.steps[step]]


def finish(driver: CachingDriver, get_oracle, kind: str = "hybrid") -> dict[int, int]:
    """Run to the end; completed requests equal the oracle. Return the skipped tokens of each."""
    records = driver.run()
    completed = {name: one for name, one in records.items() if one.status is Status.COMPLETED}
    for request_id in completed:
        assert_equals_oracle(driver, request_id, get_oracle(kind))
    return {name: completed[name].skipped_prefill_token_count for name in sorted(completed)}


@pytest.mark.parametrize(("kind", "max_tokens"), long_except([("attention_only", 400), ("hybrid", 30)], CASES))
class TestLeaders:
    """Leaders, with and without chunks."""

    def test_followers_resume_at_the_common_prefix(self, get_oracle, kind, max_tokens):
        """The leader leaves a snapshot there beside its own."""
        driver = build_driver(get_oracle, kind, max_tokens=max_tokens)
        add_all(driver)
        assert finish(driver, get_oracle, kind) == {0: 0, 1: COMMON, 2: COMMON}
        assert waits(driver) == 2
        assert driver.engine.lifetime_prefill_token_count == 109 + 2 * (109 - COMMON)
        if kind == "hybrid":
            assert assert_snapshots_equal_oracle(driver, ALIKE[0], get_oracle(kind)) == [COMMON, LAST]

    def test_each_follower_has_its_own_common_prefix(self, get_oracle, kind, max_tokens):
        """Three requested positions, three snapshots in the leader's one prefill."""
        driver = build_driver(get_oracle, kind, max_tokens=max_tokens)
        driver.add(0, ALIKE[0])
        for request_id, length in ((1, 20), (2, 37), (3, 64), (4, 65)):
            driver.add(request_id, ALIKE[0][:length])
        third = 48 if kind == "hybrid" else 63
        assert finish(driver, get_oracle, kind) == {0: 0, 1: 16, 2: 32, 3: third, 4: 64}
        if kind == "hybrid":
            assert waits(driver) == 4
            snapshots = assert_snapshots_equal_oracle(driver, ALIKE[0], get_oracle(kind))
            assert snapshots == [16, 32, 48, 64, LAST]

    def test_an_aborted_leader(self, get_oracle, kind, max_tokens):
        """The leader's reservation is returned; the first follower leads, and takes the snapshot for the second."""
        driver = build_driver(get_oracle, kind, max_tokens=max_tokens)
        add_all(driver)
        plan = driver.scheduler.schedule()  # admitted, and gone before anything is computed
        assert [deferral.wait_for for deferral in plan.deferrals] == [0, 0]
        driver.scheduler.abandon(plan.chunks, "given up")
        driver.engine.check()
        driver.engine.abort_request(0)
        assert finish(driver, get_oracle, kind) == {1: 0, 2: COMMON}

    def test_a_failing_leader(self, get_oracle, kind, max_tokens):
        """The oldest request leads again; nothing of the failed forward is visible."""
        driver = build_driver(get_oracle, kind, max_tokens=max_tokens)
        add_all(driver)
        for call in (0, 1):
            with FAILING[kind](call), pytest.raises(Broken):
                driver.step()
            driver.engine.check()
            assert (driver.scheduler.cache.use().blocks_cached, driver.scheduler.cache.use().slots_used) == (0, 0)
        assert finish(driver, get_oracle, kind) == {0: 0, 1: COMMON, 2: COMMON}
        assert waits(driver) == 2

    def test_unrelated_requests_overtake(self, get_oracle, kind, max_tokens):
        driver = build_driver(get_oracle, kind, max_tokens=max_tokens)
        add_all(driver, 2)
        driver.add(2, make_prompt(40, seed=9))
        assert finish(driver, get_oracle, kind) == {0: 0, 1: COMMON, 2: 0}
        order = [0, 2, 1] if max_tokens == 400 else [0, 1, 2]  # in chunks the leader leaves it no room
        assert list(dict.fromkeys(request_id for step in driver.steps for request_id, _, _ in step)) == order


@pytest.mark.parametrize(("slots", "expected"), [(0, {0: 0, 1: 0, 2: 0}), (1, {0: 0, 1: COMMON})])
@pytest.mark.parametrize("max_tokens", [30, 400])
def test_waiting_needs_a_slot_for_the_snapshot(get_oracle, slots, expected, max_tokens):
    """Without slots no request waits; one slot serves all that need the same snapshot, and others do not wait."""
    driver = build_driver(get_oracle, slots=slots, max_tokens=max_tokens)
    add_all(driver)
    driver.add(3, ALIKE[0][:37])
    driver.step()
    assert waits(driver) == 2 * slots
    assert (3 in admitted(driver, 0)) == (max_tokens == 400)
    assert finish(driver, get_oracle).items() >= expected.items()


@pytest.mark.parametrize(("kind", "computed"), [("hybrid", 30), ("attention_only", 60), ("hybrid", 60), ("hybrid", 90)])
def test_a_leader_aborted_in_mid_prefill(get_oracle, kind, computed):
    """The successor shares the blocks that the leader left; with states it resumes only at a snapshot."""
    driver = build_driver(get_oracle, kind, max_tokens=30)
    add_all(driver)
    while driver.engine.get_request(0).computed_end < computed:
        driver.step()
    driver.engine.abort_request(0)
    driver.engine.check()
    if kind == "hybrid":
        assert driver.states.obtainable_count == driver.states.total
    skipped = finish(driver, get_oracle, kind)
    shared = min(computed // BLOCK * BLOCK, COMMON)
    assert driver.matched[1] == [shared // BLOCK]
    assert skipped == {1: shared if kind == "attention_only" or computed == 90 else 0, 2: COMMON}


def test_no_request_waits_for_blocks_that_the_leader_has_passed(get_oracle):
    """The leader computes blocks that the other needs, but its states there are gone."""
    driver = build_driver(get_oracle, max_tokens=80)
    driver.add(0, ALIKE[0])
    driver.step()
    assert driver.engine.get_request(0).computed_end == 80
    driver.add(1, [*ALIKE[0][:105], 5, 6])  # 96 in common: it waits
    driver.add(2, [*ALIKE[0][:90], 5])  # 80 in common, and 80 computed: it does not
    driver.step()
    assert admitted(driver, -1) == [0, 2]
    assert waits(driver) == 1
    assert finish(driver, get_oracle) == {0: 0, 1: 96, 2: 64}  # SI-1: where no states were requested


def test_a_snapshot_that_is_given_up_before_the_follower_comes(get_oracle):
    """The follower waited in vain, and computes; it neither fails nor stalls."""
    driver = build_driver(get_oracle, slots=1, max_requests=1, max_tokens=400)
    add_all(driver, 2)
    driver.step()
    assert (waits(driver), driver.states.used_count) == (1, 1)
    driver.forget(ALIKE[0], [COMMON])
    assert finish(driver, get_oracle) == {0: 0, 1: 0}
    assert driver.matched[1] == [4]
