"""KV-10: times of events, TTFT and latency; counts of computed and recomputed tokens.

The order of events is checked by scheduling/caching_machine.py.
"""

from __future__ import annotations

import itertools
import time
from types import SimpleNamespace

import pytest

from megatron_ext.engine.step_log import StepLog
from megatron_ext.scheduling.request_events import EventType
from tests.unit_tests.support.driver import Driver, make_prompt


@pytest.fixture
def pressed(get_driver) -> Driver:
    """Pauses, evictions, a suspension, chunks."""
    driver = get_driver(block_count=12, max_tokens=40)
    for request_id, length in enumerate((64, 48, 31, 15, 129, 16)):
        driver.add(request_id, make_prompt(length), num_tokens_to_generate=20)
    for _ in range(6):
        driver.step()
    driver.engine.suspend()
    driver.engine.resume()
    driver.run()
    return driver


def test_computed_and_recomputed_tokens_are_exact(pressed):
    """Against the chunks that ran: what was below a request's high-water mark was computed again."""
    for request_id, record in pressed.records.items():
        reached = again = 0
        for start, end in pressed.seen[request_id].chunks:
            again += max(0, min(end, reached) - start)
            reached = max(reached, end)
        assert record.recomputed_token_count == again
        assert record.computed_prefill_token_count == record.prompt_token_count
        assert record.step_count == len(pressed.seen[request_id].chunks)
        assert record.prefill_reasons == {"caching_off": record.prompt_token_count}
        assert (record.skipped_prefill_token_count, record.matched_block_count) == (0, 0)
    assert sum(record.recomputed_token_count for record in pressed.records.values()) > 0


def test_the_lifetime_count_is_the_sum_over_requests(pressed):
    total = sum(r.computed_prefill_token_count + r.recomputed_token_count for r in pressed.records.values())
    assert pressed.engine.lifetime_prefill_token_count == total
    assert pressed.engine.core.counters.skipped_tokens == 0
    assert pressed.engine.step_count == len(pressed.steps)


def test_times_lie_within_the_time_of_the_request(get_driver, monkeypatch):
    driver = get_driver()
    monkeypatch.setattr(time, "time", lambda: 1234.5)  # it may be set while the test runs
    before = time.monotonic()
    driver.add(0, make_prompt(9))
    submitted = time.monotonic()
    driver.step()
    first = time.monotonic()
    driver.run()
    after = time.monotonic()
    record = driver.records[0]
    added, admitted, token, finished = (event.timestamp for event in record.events)
    assert before <= added <= submitted <= admitted < token <= first <= finished <= after
    assert record.ttft == token - added
    assert record.ttft < record.latency
    assert record.arrival_wall_time == 1234.5
    assert record.events[0].to_dict() == {"type": "ADD_ENGINE", "timestamp": added, "payload": None}


def test_an_evicted_request_keeps_its_first_token_time(pressed):
    evicted = [record for record in pressed.records.values() if "EVICT" in [e.type.name for e in record.events]]
    assert evicted
    for record in evicted:
        times = {event.type: event.timestamp for event in record.events}
        assert times[EventType.FIRST_TOKEN] - times[EventType.ADD_ENGINE] == record.ttft


def test_log_line_describes_the_step(get_driver, caplog):
    driver = get_driver(max_tokens=40)
    driver.engine.core.step_log.interval = 2
    driver.add(0, make_prompt(50), num_tokens_to_generate=4)
    with caplog.at_level("INFO", logger="megatron_ext.engine.step_log"):
        driver.run()
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert "0 decode + 10 prefill tokens" in lines[0]
    assert "1 decode + 0 prefill tokens" in lines[1]
    assert "prefill (cumul)" not in lines[1], "caching is off"


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
