"""Each case, run with the tool, gives its golden values."""

from __future__ import annotations

import pytest

from tests.functional_tests.cases import Case, find_cases
from tests.functional_tests.checker import LOG_PROB_TOLERANCE, differences, golden_values
from tests.functional_tests.megatron_rules import problems, run_megatrons_checker

CASES = find_cases()
SAFE_MARGIN = 2 * LOG_PROB_TOLERANCE  # nats between the two best tokens
SCORES = ("--return-log-probs", "--skip-prompt-log-probs", "--top-n-logprobs", "2")
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
each_run = pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.name, marks=[pytest.mark.worlds] * (case.ranks > 1)) for case in CASES]
)


@each_run
def test_fresh_run_equals_golden_values(case: Case):
    """MF-6: a run has its golden values, and Megatron's checker takes both."""
    golden, fresh = case.golden_values(), case.run()
    found = differences(golden, fresh, case.metrics, case.tolerance)
    found += problems(golden.requests, fresh.requests, case.outcome)
    assert not found, "\n".join([f"{case.name} (if it is meant to differ: `{case.regenerate}`)", *found])
    run_megatrons_checker(golden.requests, fresh.requests, case.config)


@pytest.mark.parametrize("case", [case for case in CASES if case.outcome], ids=lambda case: case.name)
def test_greedy_choices_are_clear(case: Case):
    """Greedy choices must be clear, since another CPU may choose the other of two close tokens.

    A case without log-probs is run with them.
    """
    golden, margins = case.golden_values(), []
    if any(not entry.get("top_n_logprobs") for entry in golden.entries.values()):
        golden = golden_values(case.run(*SCORES))
    for entry in golden.entries.values():
        for chosen, best in zip(entry["generated_logprobs"], entry["top_n_logprobs"], strict=True):
            first, second = sorted(best.values(), reverse=True)[:2]
            if chosen == first:  # not sampled
                margins.append(first - second)
    assert margins
    assert min(margins) >= SAFE_MARGIN


def test_pressure_really_pauses_and_evicts():
    (golden,) = (case.golden_values() for case in CASES if case.name.endswith("/pressure"))
    types = {event["type"] for entry in golden.entries.values() for event in entry["events"]}
    assert {"PAUSE", "EVICT"} <= types
    assert sum(entry["recomputed_token_count"] for entry in golden.entries.values()) > 0


@each_case
def test_golden_values_of_golden_values_change_nothing(case: Case):
    """Rounding is stable, so that an unchanged run gives an unchanged file; there are no times in it."""
    golden = case.golden_values()
    assert golden_values(golden) == golden
