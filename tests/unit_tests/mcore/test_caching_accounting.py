"""EX-2, KV-10, KV-13: every prompt token skipped, or computed for one reason; counted once, whatever happens."""

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


@pytest.mark.parametrize(
    ("prompt", "params", "matched", "reasons"),
    [
        pytest.param(PROMPT, {}, 3, {"partial_block": 7}, id="partial_block"),
        pytest.param(PROMPT[:48], {}, 3, {"last_token": 1}, id="last_token"),
        pytest.param([*PROMPT[:20], *[1] * 30], {}, 1, {"not_cached": 32, "partial_block": 2}, id="divergence"),
        pytest.param(PROMPT[:10], {}, 0, {"partial_block": 10}, id="short"),
        pytest.param([1, *PROMPT], {}, 0, {"not_cached": 48, "partial_block": 8}, id="shifted"),
        pytest.param(PROMPT, {"enable_prefix_caching": False}, 0, {"opted_out": 55}, id="opted_out"),
        pytest.param(
            PROMPT,
            {"enable_prefix_caching": False, "skip_prompt_log_probs": False},
            0,
            {"opted_out": 55},
            id="opted_out_first",
        ),
        pytest.param(PROMPT, {"skip_prompt_log_probs": False}, 0, {"prompt_logprobs": 55}, id="prompt_logprobs"),
        pytest.param(PROMPT, {"cache_salt": "b"}, 0, {"not_cached": 48, "partial_block": 7}, id="salted"),
    ],
)
def test_reasons(warm, oracle, prompt, params, matched, reasons):
    """EX-2, KV-9: the first reason that applies, token by token; the sums are exact."""
    warm.add(1, prompt, **params)
    warm.run()
    record = warm.records[1]
    assert (record.matched_block_count, record.prefill_reasons) == (matched, reasons)
    assert record.skipped_prefill_token_count == len(prompt) - sum(reasons.values())
    assert_equals_oracle(warm, 1, oracle)


def test_repeats(warm, oracle):
    """EX-2: repeats of one prompt have ledgers of their own, and the engine's is their sum."""
    for request_id in (1, 2, 3):
        warm.add(request_id, PROMPT)
        warm.run()
        assert warm.records[request_id].prefill_reasons == {"partial_block": 7}
        assert warm.engine.lifetime_skipped_token_count == 48 * request_id
        assert warm.engine.lifetime_prefill_token_count == 55 + 7 * request_id
        assert warm.scheduler.counters.hits == request_id
        assert_equals_oracle(warm, request_id, oracle)
    assert warm.engine.prefix_cache_statistics()["hits"] == 3


@pytest.mark.parametrize(
    ("limits", "blockers"),
    [
        pytest.param({"max_requests": 1}, [60], id="requests"),
        pytest.param({"block_count": 7}, [60], id="blocks"),
        pytest.param({"max_tokens": 61, "enable_chunked_prefill": False, "max_requests": 4}, [60, 59, 58], id="tokens"),
    ],
)
def test_a_retried_admission_counts_once(get_caching_driver, oracle, limits, blockers):
    """KV-13: refused in several steps though its blocks are cached: nothing is counted or pinned until it gets in."""
    driver = get_caching_driver(**limits)
    driver.add(0, PROMPT[: 2 * BLOCK], num_tokens_to_generate=1)
    driver.run()
    for request_id, length in enumerate(blockers, start=1):
        driver.add(request_id, make_prompt(length), num_tokens_to_generate=8)
    driver.add(9, PROMPT)
    request, counters = driver.engine.get_request(9), driver.scheduler.counters
    refused = 0
    while not request.block_table:
        assert (counters.hits, counters.blocks_matched, counters.skipped_tokens) == (0, 0, 0)
        assert (
            request.sequence.ledger.matched_blocks,
            request.sequence.ledger.skipped,
            request.sequence.running_slot,
        ) == (None, 0, None)
        assert driver.scheduler.cache.use().blocks_evictable >= 2
        driver.step()
        refused += not request.block_table
    assert refused >= 3
    assert (counters.hits, counters.blocks_matched, counters.skipped_tokens) == (1, 2, 32)
    driver.run()
    assert driver.events(9) == ["ADD_ENGINE", "ADD_CONTEXT", "FIRST_TOKEN", "FINISH"]
    assert driver.records[9].prefill_reasons == {"not_cached": 16, "partial_block": 7}
    assert_equals_oracle(driver, 9, oracle)


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
    assert driver.engine.prefix_cache_statistics().items() >= (use | happened).items()


def test_the_log_line(warm, caplog):
    """FX-6: computed and skipped tokens, cached and evictable blocks."""
    warm.engine.core.logging_interval = 1
    warm.add(1, PROMPT, num_tokens_to_generate=1)
    with caplog.at_level("INFO", logger="megatron_ext.engine.statistics"):
        warm.run()
    line = caplog.records[-1].getMessage()
    assert "0 decode + 7 prefill tokens" in line
    assert "KV blocks: 0 of 100 in use, 3 cached, 3 evictable" in line
    assert "62 computed, 48 skipped (43.6%)" in line
