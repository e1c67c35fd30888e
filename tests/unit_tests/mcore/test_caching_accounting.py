"""EX-2, EX-5, KV-10: accounts, log-probs of prompts, events and statistics of an engine with a cache.

scheduling/test_accounting.py has the reasons.
"""

from __future__ import annotations

import pytest

from megatron_ext.scheduling.request_events import EventType
from tests.priority import TestPriority
from tests.unit_tests.support.caching import BLOCK, Broken, CachingDriver, failing_forward
from tests.unit_tests.support.driver import assert_equals_oracle, make_prompt

pytestmark = pytest.mark.priority(TestPriority.HIGH)

PROMPT = make_prompt(3 * BLOCK + 7)


@pytest.fixture
def warm(get_caching_driver) -> CachingDriver:
    """Has computed three blocks of `PROMPT`, for request 0."""
    driver = get_caching_driver(max_tokens=60, max_requests=4)
    driver.add(0, PROMPT, num_tokens_to_generate=1)
    driver.run()
    return driver


def test_failures_and_suspensions_count_no_token_twice(warm, oracle):
    """EX-2: skipped once at the first admission; what is not there any more later on is computed again."""
    warm.add(1, [*PROMPT[:48], *make_prompt(90, seed=2)])
    warm.step()
    with failing_forward(), pytest.raises(Broken):
        warm.step()
    warm.step()
    warm.engine.suspend()
    warm.engine.resume()
    warm.run()
    record = warm.records[1]
    assert warm.matched[1] == [3, 6, 0]
    assert record.skipped_prefill_token_count == 48
    assert record.prefill_reasons == {"not_cached": 128 - 48, "partial_block": 10}
    assert record.recomputed_token_count > 108
    assert_equals_oracle(warm, 1, oracle)


def test_prompt_log_probs(get_caching_driver, oracle):
    """EX-5: asked for, nothing is skipped, and every value is right; what was computed serves others, in any order."""
    driver = get_caching_driver(max_tokens=40)
    driver.add(0, PROMPT, num_tokens_to_generate=20)
    driver.step()
    driver.step()
    driver.add(1, PROMPT, skip_prompt_log_probs=False, num_tokens_to_generate=30)
    driver.step()
    assert set(driver.scheduler.pending_blocks.requests()) == {1}
    while 0 not in driver.records:
        driver.step()
    driver.add(2, PROMPT)
    driver.run()
    assert driver.skipped(0, 1, 2) == [0, 0, 48]
    assert len(driver.records[1].prompt_log_probs) == 54
    assert driver.records[1].matched_block_count == 0
    for request_id in range(3):
        assert_equals_oracle(driver, request_id, oracle)


def test_prompt_log_probs_after_a_suspension(get_caching_driver, oracle):
    """EX-5: log-probs from before stay, missing ones are computed, though others have cached the prompt meanwhile."""
    driver = get_caching_driver(max_tokens=40)
    driver.add(0, make_prompt(100), skip_prompt_log_probs=False)
    driver.step()
    driver.engine.suspend()
    driver.engine.resume()
    driver.add(1, make_prompt(100))
    driver.run()
    assert driver.skipped(0, 1) == [0, 96]
    assert driver.records[0].prefill_reasons == {"prompt_logprobs": 100}
    assert driver.records[0].recomputed_token_count == 40
    for request_id in range(2):
        assert_equals_oracle(driver, request_id, oracle)


def test_events_and_times(warm):
    """KV-10: a hit tells the same story as a miss; its first token comes after one step, at a later time than it."""
    warm.add(1, [*PROMPT[:48], *make_prompt(60, seed=2)], num_tokens_to_generate=3)
    warm.add(2, [*PROMPT[:48], *make_prompt(60, seed=3)], num_tokens_to_generate=3)
    warm.run()
    story = ["ADD_ENGINE", "ADD_CONTEXT", "FIRST_TOKEN", "FINISH"]
    assert [warm.events(request_id) for request_id in (1, 2)] == [story, story]
    assert warm.skipped(1, 2) == [48, 48]
    assert [warm.records[request_id].step_count for request_id in (1, 2)] == [3, 4]
    for request_id in (1, 2):
        record = warm.records[request_id]
        times = {event.type: event.timestamp for event in record.events}
        assert record.ttft == times[EventType.FIRST_TOKEN] - times[EventType.ADD_ENGINE] > 0
        assert times[EventType.ADD_ENGINE] < times[EventType.ADD_CONTEXT] < times[EventType.FIRST_TOKEN]


def test_statistics(get_caching_driver):
    """EX-2, FX-6: statistics of the engine in the JSON output and in the log line."""
    driver = get_caching_driver(block_count=6)
    for request_id in range(3):
        driver.add(request_id, PROMPT, num_tokens_to_generate=1)
    driver.run()
    driver.add(3, make_prompt(70), num_tokens_to_generate=1)
    driver.run()
    use = {"blocks_total": 6, "blocks_cached": 5, "blocks_evictable": 5, "blocks_in_use": 0, "blocks_evicted": 2}
    happened = {"hits": 2, "coordination_waits": 2}
    assert driver.engine.core.statistics().prefix_cache().items() >= (use | happened).items()


def test_the_log_line(warm, caplog):
    """FX-6: computed and skipped tokens, cached and evictable blocks."""
    warm.engine.core.step_log.interval = 1
    warm.add(1, PROMPT, num_tokens_to_generate=1)
    with caplog.at_level("INFO", logger="megatron_ext.engine.step_log"):
        warm.run()
    line = caplog.records[-1].getMessage()
    assert "0 decode + 7 prefill tokens" in line
    assert line.partition(" | KV ")[2].split(" ... ") == [
        "blocks: 0 of 100 in use",
        "prefix cache (cumul): 1 hits, 3 blocks matched",
        "prefill (cumul): computed 62, skipped 48 (43.6% skipped)",
        "prefix cache util: KV 3/100 blocks cached (3 evictable)",
    ]
