"""KV-5, EX-8: aborts at every stage, forwards that raise and preemptions, among requests that share blocks and states.

Cases without a kind have both, in a hybrid model.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from megatron_ext.scheduling.record import Status
from tests.on_request import long_except
from tests.unit_tests.support.caching import BLOCK, Broken, CachingDriver, failing_forward
from tests.unit_tests.support.driver import assert_equals_oracle, make_prompt
from tests.unit_tests.support.hybrid_caching import HybridDriver, build_driver, failing_scan

PROMPT = make_prompt(4 * BLOCK + 5)
LONG = [*PROMPT, *make_prompt(100, seed=1)]
FAILING = {"attention_only": failing_forward, "hybrid": failing_scan}


def in_flight(get_oracle, kind: str) -> CachingDriver:
    """Start requests: one decodes, one prefills on the first's blocks, one waits for the second, one is unrelated."""
    driver = build_driver(get_oracle, kind, max_tokens=40)
    driver.add(0, PROMPT, num_tokens_to_generate=20)
    driver.step()
    driver.step()
    driver.add(1, LONG)
    driver.add(2, [*LONG[:150], 5])
    driver.add(3, make_prompt(30, seed=2))
    driver.step()
    assert [request.computed_end for request in driver.scheduler.queues.running] == [70, 103]
    return driver


def assert_nothing_is_held(driver: CachingDriver) -> None:
    """No block is in use, no request leads another, and no slot is reserved."""
    driver.engine.check()
    assert driver.free_blocks == driver.scheduler.cache.pool.total
    assert driver.scheduler.pending_blocks.requests() == set()
    if isinstance(driver, HybridDriver):
        assert driver.states.obtainable_count == driver.states.total


def finish(driver: CachingDriver, get_oracle, kind: str = "hybrid") -> dict[int, int]:
    """Run to the end; completed requests equal the oracle. Return the skipped tokens of each."""
    records = driver.run()
    completed = {name: one for name, one in records.items() if one.status is Status.COMPLETED}
    for request_id in completed:
        assert_equals_oracle(driver, request_id, get_oracle(kind))
    return {name: completed[name].skipped_prefill_token_count for name in sorted(completed)}


# A step of the hybrid model has 4 scans: two layers, each of one decode and one prefill call.
@pytest.mark.parametrize(("kind", "call"), [("attention_only", 0), ("attention_only", 1), ("hybrid", 0), ("hybrid", 3)])
def test_a_forward_that_raises(get_oracle, kind, call):
    """KV-5: a failed forward publishes and leaks nothing; earlier blocks and snapshots are found, and all succeed."""
    driver = in_flight(get_oracle, kind)
    lifetime, skipped = driver.engine.lifetime_prefill_token_count, driver.engine.core.counters.skipped_tokens
    with FAILING[kind](call), pytest.raises(Broken):
        driver.step()
    assert_nothing_is_held(driver)
    assert driver.scheduler.cache.use().blocks_cached == 6
    assert [request.request_id for request in driver.scheduler.queues.waiting] == [0, 1, 2, 3]
    assert driver.engine.lifetime_prefill_token_count == lifetime
    assert driver.engine.core.counters.skipped_tokens == skipped
    if kind == "hybrid":
        assert driver.snapshots_of(LONG) == [64]
        with FAILING[kind](1), pytest.raises(Broken):  # a step without a decode
            driver.step()
        assert_nothing_is_held(driver)
    assert finish(driver, get_oracle, kind) == {0: 0, 1: 64, 2: 144, 3: 0}
    assert driver.records[0].recomputed_token_count == 70 - 64
    assert "ERROR_TRANSIENT" in driver.events(1)


def test_a_failed_step_shows_no_opportunistic_snapshot(get_oracle):
    """HY-6, SI-1: though some layers had written theirs; the step that repeats it shows them."""
    driver = build_driver(get_oracle)
    driver.add(0, LONG)
    with failing_scan(), pytest.raises(Broken):
        driver.step()
    assert driver.snapshots_of(LONG, opportunistic=True) == []
    assert driver.scheduler.cache.use().provisional_taken == 0
    assert finish(driver, get_oracle) == {0: 0}
    assert driver.scheduler.cache.use().provisional_taken > 0


def until(driver: CachingDriver, request_id: int, computed: int) -> None:
    while driver.engine.get_request(request_id).computed_end < computed:
        driver.step()


# What is done before the abort, the aborted request, and the tokens that the others skip.
ABORTS: dict[str, tuple[Callable[[CachingDriver], None], int, dict[int, int]]] = {
    "waiting": (lambda driver: None, 3, {0: 0, 1: 64, 2: 144}),
    "follower": (lambda driver: None, 2, {0: 0, 1: 64, 3: 0}),
    "leader_in_mid_prefill": (lambda driver: None, 1, {0: 0, 2: 64, 3: 0}),  # it resumes as the leader did
    "leader_that_has_passed_the_position": (lambda driver: until(driver, 1, 145), 1, {0: 0, 2: 144, 3: 0}),
    "decoding_owner_of_shared_blocks": (lambda driver: None, 0, {1: 64, 2: 144, 3: 0}),
    "decoding_after_a_boundary": (lambda driver: until(driver, 0, 81), 0, {1: 64, 2: 144, 3: 0}),
}
EACH_ABORT = list(zip(itertools.cycle(FAILING), ABORTS, strict=False))


@pytest.mark.parametrize(("kind", "stage"), long_except(EACH_ABORT, itertools.product(FAILING, ABORTS)))
def test_aborts(get_oracle, kind, stage):
    """EX-8: own blocks, reserved slots, pins and the running slot are free at once; what was published stays."""
    prepare, victim, skipped = ABORTS[stage]
    driver = in_flight(get_oracle, kind)
    prepare(driver)
    request, pool = driver.engine.get_request(victim), driver.scheduler.cache.pool
    references = {block: pool.references(block) for block in request.block_table}
    use = driver.scheduler.cache.use()
    driver.engine.abort_request(victim)
    driver.engine.check()
    assert {block: pool.references(block) for block in references} == {b: n - 1 for b, n in references.items()}
    assert (request.block_table, request.running_slot) == ((), None)
    assert victim not in driver.scheduler.pending_blocks.requests()
    after = driver.scheduler.cache.use()
    assert (after.blocks_cached, after.slots_used) == (use.blocks_cached, use.slots_used)
    if kind == "hybrid":
        others = [one for request in driver.scheduler.queues for one in request.snapshots]
        assert driver.states.total - driver.states.obtainable_count == len(others)
    found = finish(driver, get_oracle, kind)
    assert driver.records[victim].status is Status.ABORTED
    if kind == "attention_only" and stage == "leader_in_mid_prefill":
        skipped = skipped | {2: 96}  # the leader's blocks, which need no states
    assert found == skipped
