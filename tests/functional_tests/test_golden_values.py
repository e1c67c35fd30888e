"""Each case, run with the tool, gives its golden values."""

from __future__ import annotations

import pytest

from tests.functional_tests.cases import Case, find_cases
from tests.functional_tests.checker import LOG_PROB_TOLERANCE, differences, golden_values, requests
from tests.priority import TestPriority

pytestmark = pytest.mark.priority(TestPriority.CRITICAL)

CASES = find_cases()
SAFE_MARGIN = 2 * LOG_PROB_TOLERANCE  # nats between the two best tokens


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_fresh_run_equals_golden_values(case: Case):
    found = differences(case.golden_values(), case.run(), case.metrics)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_golden_values_hold_no_times(case: Case):
    golden = case.golden_values()
    assert not {"throughput", "mem-max-allocated-bytes", "version"} & golden.keys()
    for entry in requests(golden).values():
        assert not {"latency", "ttft"} & entry.keys()
        assert all(event.keys() == {"type", "payload"} for event in entry["events"])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_greedy_choices_are_clear(case: Case):
    """Where the two best tokens are close, another CPU may choose the other one: such a case says nothing."""
    margins = []
    for entry in requests(case.golden_values()).values():
        for chosen, best in zip(entry["generated_logprobs"], entry["top_n_logprobs"], strict=True):
            first, second = sorted(best.values(), reverse=True)[:2]
            if chosen == first:  # not sampled
                margins.append(first - second)
    assert margins
    assert min(margins) >= SAFE_MARGIN


def test_pressure_really_pauses_and_evicts():
    (golden,) = (case.golden_values() for case in CASES if case.name.endswith("/pressure"))
    types = {event["type"] for entry in requests(golden).values() for event in entry["events"]}
    assert {"PAUSE", "EVICT"} <= types
    assert sum(entry["recomputed_token_count"] for entry in requests(golden).values()) > 0


def test_golden_values_of_golden_values_change_nothing():
    """Rounding is stable, so that an unchanged run gives an unchanged file."""
    for case in CASES:
        golden = case.golden_values()
        assert golden_values(golden) == golden
