"""KV-5, EX-8: forwards that raise, aborts at every stage, and preemptions, among requests with snapshots."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from megatron_ext.scheduling.record import Status
from tests.priority import TestPriority
from tests.unit_tests.support.caching import BLOCK, POLICIES, Broken
from tests.unit_tests.support.driver import assert_equals_oracle, make_prompt
from tests.unit_tests.support.hybrid_caching import HybridDriver, build_driver, failing_scan

pytestmark = pytest.mark.priority(TestPriority.HIGH)

PROMPT = make_prompt(4 * BLOCK + 5)
LONG = [*PROMPT, *make_prompt(100, seed=1)]


@pytest.fixture
def oracle(get_oracle):
    return get_oracle("hybrid")


def in_flight(driver: HybridDriver) -> HybridDriver:
    """Start requests: one decodes, a resumed one is in mid-prefill, one waits for it, one is unrelated."""
    driver.add(0, PROMPT, num_tokens_to_generate=20)
    driver.step()
    driver.step()
    driver.add(1, LONG)
    driver.add(2, [*LONG[:150], 5])
    driver.add(3, make_prompt(30, seed=2))
    driver.step()
    assert [request.computed_end for request in driver.scheduler.queues.running] == [70, 103]
    assert [one.position for one in driver.engine.get_request(1).sequence.snapshots] == [144]  # for the follower
    return driver


def assert_nothing_is_reserved(driver: HybridDriver) -> None:
    driver.engine.check()
    assert driver.states.obtainable_count == driver.states.total


# A step has 4 scans: two layers, each of one decode and one prefill call.
@pytest.mark.parametrize("call", [0, 1, 3])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_forward_that_raises(get_oracle, oracle, policy, call):
    """KV-5, section 9 A 9: reservations are given back, nothing of the step is found, and all succeed."""
    driver = in_flight(build_driver(get_oracle, policy=policy, max_tokens=40))
    for last in (call, 1):  # then there is no decode
        with failing_scan(last), pytest.raises(Broken):
            driver.step()
        assert_nothing_is_reserved(driver)
        assert driver.snapshots_of(LONG) == ([64] if policy == "lru" else [])
    assert [request.request_id for request in driver.scheduler.queues.waiting] == [0, 1, 2, 3]
    driver.run()
    assert driver.skipped(0, 1, 2, 3) == [0, 64, 144, 0]
    assert driver.records[0].recomputed_token_count == (70 - 64 if policy == "lru" else 70)
    for request_id in range(4):
        assert_equals_oracle(driver, request_id, oracle)


@pytest.mark.parametrize(
    "target",
    [
        pytest.param("megatron_ext.mcore.context.stage_step", id="states_are_restored_already"),
        pytest.param("megatron_ext.mcore.controller.choose_tokens", id="the_forward_has_succeeded"),
    ],
)
def test_failing_before_and_after_the_forward(get_oracle, oracle, monkeypatch, target):
    """KV-5: the slots were written, but no request can find them."""
    driver = in_flight(build_driver(get_oracle, max_tokens=40))

    def fail(*_: object, **__: object) -> None:
        raise Broken

    with monkeypatch.context() as patch:
        patch.setattr(target, fail)
        for _ in range(3):
            with pytest.raises(Broken):
                driver.step()
            assert_nothing_is_reserved(driver)
            assert driver.snapshots_of(LONG) == [64]
    driver.run()
    assert driver.skipped(0, 1, 2, 3) == [0, 64, 144, 0]
    for request_id in range(4):
        assert_equals_oracle(driver, request_id, oracle)


def test_failing_when_the_only_slot_was_to_be_written(get_oracle, oracle):
    """The slot's content is lost with the failed step; the request computes all tokens, and leaves it again."""
    driver = build_driver(get_oracle, slots=1)
    driver.sight(0, PROMPT)
    driver.add(1, LONG)
    with failing_scan(), pytest.raises(Broken):
        driver.step()
    assert_nothing_is_reserved(driver)
    assert driver.states.used_count == 0
    driver.run()
    assert driver.records[1].matched_block_count == 4
    assert driver.seen[1].chunks[0][0] == 0
    assert driver.sight(2, LONG) == 64  # where the match ended: the most useful one came first
    for request_id in range(3):
        assert_equals_oracle(driver, request_id, oracle)


def test_retried_admissions_count_once(get_oracle, oracle):
    """KV-13, section 9 A 6: a warm prompt whose steps fail skips its prefix once in the books."""
    driver = build_driver(get_oracle)
    driver.sight(0, PROMPT)
    driver.add(1, PROMPT)
    for _ in range(3):
        with failing_scan(), pytest.raises(Broken):
            driver.step()
    driver.run()
    assert driver.skipped(1) == [64]
    assert driver.engine.lifetime_skipped_token_count == 64
    assert driver.engine.lifetime_prefill_token_count == 69 + 5
    assert_equals_oracle(driver, 1, oracle)


def until(driver: HybridDriver, request_id: int, computed: int) -> None:
    while driver.engine.get_request(request_id).computed_end < computed:
        driver.step()


ABORTS: dict[str, tuple[Callable[[HybridDriver], None], int, list[int]]] = {
    "waiting": (lambda driver: None, 3, [0, 64, 144]),
    "follower": (lambda driver: None, 2, [0, 64, 0]),
    "leader_in_mid_prefill": (lambda driver: None, 1, [0, 64, 0]),  # the follower resumes as the leader did
    "leader_that_has_passed_the_wish": (lambda driver: until(driver, 1, 145), 1, [0, 144, 0]),
    "decoding_owner_of_shared_blocks": (lambda driver: None, 0, [64, 144, 0]),
    "decoding_after_a_boundary": (lambda driver: until(driver, 0, 81), 0, [64, 144, 0]),
}


@pytest.mark.parametrize("stage", ABORTS)
def test_aborts(get_oracle, oracle, stage):
    """EX-8: reserved slots, pins and running state slots are free at once; what was published stays.

    The others go on.
    """
    prepare, victim, skipped = ABORTS[stage]
    driver = in_flight(build_driver(get_oracle, max_tokens=40))
    prepare(driver)
    others = [request for request in driver.scheduler.queues if request.request_id != victim]
    reserved = [one for request in others for one in request.sequence.snapshots]
    used = driver.states.used_count
    driver.engine.abort_request(victim)
    driver.engine.check()
    assert driver.states.total - driver.states.obtainable_count == len(reserved)
    assert driver.states.used_count == used
    driver.run()
    assert driver.records[victim].status is Status.ABORTED
    assert driver.skipped(*(request_id for request_id in range(4) if request_id != victim)) == skipped
    for request_id in set(range(4)) - {victim}:
        assert_equals_oracle(driver, request_id, oracle)


@pytest.mark.parametrize("slots", [100, 0])
def test_an_evicted_request_resumes_from_its_snapshot(get_oracle, oracle, slots):
    """The evicted request's blocks were kept as evictable: only tokens after its snapshot are computed again."""
    driver = build_driver(get_oracle, slots=slots, is_exact=False, block_count=6)
    driver.add(0, make_prompt(60), num_tokens_to_generate=18)
    driver.add(1, make_prompt(20, seed=1), num_tokens_to_generate=20)
    driver.run()
    assert "EVICT" in driver.events(1)
    starts = [start for start, end in driver.seen[1].chunks if end - start > 1]
    assert starts == [0, 16 if slots else 0]
    for request_id in (0, 1):
        assert_equals_oracle(driver, request_id, oracle)


def test_paused_requests_keep_their_states(get_oracle, oracle):
    """Paused requests decode on, though others need the blocks that they share and those of their snapshots."""
    driver = build_driver(get_oracle, slots=2, is_exact=False, block_count=6)
    prompt = make_prompt(3 * BLOCK)
    for request_id, length in enumerate((48, 49, 20)):
        driver.add(request_id, [*prompt, 7][:length], num_tokens_to_generate=20)
    driver.run()
    assert driver.scheduler.counters.pauses > 0
    assert driver.skipped(1)[0] > 0
    for request_id in range(3):
        assert_equals_oracle(driver, request_id, oracle)
