"""EX-2, EX-5: accounts, log-probs of prompts, statistics and log lines of an engine.

scheduling/test_accounting.py has the reasons.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from megatron_ext.engine.step_log import StepLog
from tests.unit_tests.support.caching import BLOCK, CachingDriver
from tests.unit_tests.support.driver import assert_equals_oracle, make_prompt

PROMPT = make_prompt(3 * BLOCK + 7)


@pytest.fixture
def warm(get_caching_driver) -> CachingDriver:
    """Has computed three blocks of `PROMPT`, for request 0."""
    driver = get_caching_driver(max_tokens=60, max_requests=4)
    driver.add(0, PROMPT, num_tokens_to_generate=1)
    driver.run()
    return driver


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


def test_computed_and_recomputed_tokens_are_exact(get_driver):
    """EX-2: against the chunks that ran: what was below a request's high-water mark was computed again."""
    driver = get_driver(block_count=12, max_tokens=40)
    for request_id, length in enumerate((64, 48, 31, 15, 129, 16)):
        driver.add(request_id, make_prompt(length), num_tokens_to_generate=20)
    for _ in range(6):
        driver.step()
    driver.engine.suspend()
    driver.engine.resume()
    for request_id, record in driver.run().items():
        reached = again = 0
        for start, end in driver.seen[request_id].chunks:
            again += max(0, min(end, reached) - start)
            reached = max(reached, end)
        assert record.recomputed_token_count == again
        assert record.computed_prefill_token_count == record.prompt_token_count
        assert record.step_count == len(driver.seen[request_id].chunks)
        assert record.prefill_reasons == {"caching_off": record.prompt_token_count}
    assert sum(record.recomputed_token_count for record in driver.records.values()) > 0


def test_a_line_of_the_load_after_ten_seconds_of_work(get_caching_driver, caplog, monkeypatch):
    """Tokens a second and hit rate are of the work since the last line; time without requests is not counted."""
    driver = get_caching_driver(max_tokens=40)
    times = itertools.count(step=4.0)
    monkeypatch.setattr("megatron_ext.engine.core.time", SimpleNamespace(perf_counter=lambda: 0.0))
    driver.engine.core.step_log = StepLog(None, lambda: next(times))

    def lines(request_id: int) -> list[str]:
        caplog.clear()
        driver.add(request_id, make_prompt(70), num_tokens_to_generate=4)
        driver.run()
        return [one for one in caplog.messages if one.startswith("step ")]

    with caplog.at_level("INFO", logger="megatron_ext.engine.step_log"):
        (line,) = lines(0)  # steps end at 0, 4, 8, 12 and 16
        assert "requests: 1 running, 0 paused, 0 waiting, 0 ended" in line
        rates = "12.0 s of work: prompt 5.8 tokens/s, generation 0.2 tokens/s, prefix cache hit rate 0.0%"
        assert rates in line
        times = itertools.count(4000.0, step=4.0)
        (line,) = lines(1)  # 4 s of the first request, and 8 of its own
        assert "12.0 s of work: prompt 0.5 tokens/s" in line
        assert "prefix cache hit rate 91.4%" in line
