"""KV-6: one of several requests with an uncached prefix in common computes it; the others wait, and then hit.

With recurrent layers they wait only for a leader that will leave a snapshot for them. Which requests lead and follow:
scheduling/prefix_wait/test_prefix_leaders.py.
"""

from __future__ import annotations

import pytest

from megatron_ext.scheduling.record import Status
from tests.on_request import long_except
from tests.unit_tests.support.caching import BLOCK, CachingDriver
from tests.unit_tests.support.driver import assert_equals_oracle, make_prompt
from tests.unit_tests.support.hybrid_caching import assert_snapshots_equal_oracle, build_driver

SYSTEM = make_prompt(4 * BLOCK + 5)  # four blocks in common
ALIKE = [[*SYSTEM, *make_prompt(40, seed=seed)] for seed in range(4)]  # of 109 tokens
COMMON, LAST = 64, 96
CASES = [("attention_only", 30), ("attention_only", 400), ("hybrid", 30), ("hybrid", 400)]  # in chunks, and whole


def add_all(driver: CachingDriver, count: int = 3) -> None:
    for request_id, prompt in enumerate(ALIKE[:count]):
        driver.add(request_id, prompt)


def waits(driver: CachingDriver) -> int:
    return driver.scheduler.counters.coordination_waits


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
