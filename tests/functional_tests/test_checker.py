"""The checker can fail: each kind of change to a run is seen, and only by the metric that it belongs to."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest

from tests.functional_tests.cases import Case
from tests.functional_tests.checker import (
    LOG_PROB_TOLERANCE,
    METRICS,
    Results,
    differences,
    golden_values,
    without_rounding,
)


def fresh_run() -> Results:
    """A run of two requests as the tool writes it."""
    request = {
        "input_prompt": "1 2 3",
        "generated_text": "7 8",
        "generated_tokens": [7, 8],
        "latency": 2.0,
        "ttft": 0.5,
        "step_count": 4,
        "request_step_count": 2,
        "status": "COMPLETED",
        "error": None,
        "finish_reason": "length",
        "prompt_token_count": 3,
        "matched_block_count": 0,
        "skipped_prefill_token_count": 0,
        "computed_prefill_token_count": 3,
        "recomputed_token_count": 0,
        "prefill_reasons": {"caching_off": 3},
        "prompt_logprobs": [],
        "generated_logprobs": [-0.25, -0.5],
        "logprobs": [-0.25, -0.5],
        "top_n_logprobs": [{"7": -0.25, "9": -2.0}, {"8": -0.5, "4": -3.0}],
        "prompt_top_n_logprobs": None,
        "events": [
            {"type": "ADD_ENGINE", "timestamp": 1.0, "payload": None},
            {"type": "FIRST_TOKEN", "timestamp": 1.5, "payload": None},
            {"type": "FINISH", "timestamp": 3.0, "payload": None},
        ],
    }
    counts = {
        "throughput": [2.0],
        "mem-max-allocated-bytes": 1000,
        "lifetime_prefill_token_count": 6,
        "async_sched_step_count": 0,
        "async_sched_compaction_step_count": 0,
    }
    run = {
        "lifetime_skipped_token_count": 0,
        "model": "a model",
        "version": "0.1.0",
        "prefix_cache": None,
        "prefix_cache_lost": None,
        "speculation": None,
        "geometry": {"blocks": 10},
    }
    return Results({"0": request, "1": copy.deepcopy(request)} | counts, counts | run)


def set_to(*path_and_value) -> Callable[[Results], None]:
    """A change to a request's entry or to a count of the run: the last argument goes where the others lead."""
    *path, last, value = path_and_value

    def change(results: Results) -> None:
        place = results.requests if (*path, last)[0].isdigit() else results.run
        for key in path:
            place = place[key]
        place[last] = value

    return change


def swap_events(run: Results) -> None:
    events = run.requests["1"]["events"]
    events[0]["type"], events[1]["type"] = events[1]["type"], events[0]["type"]


CHANGES = {
    "generated_tokens": [
        set_to("1", "generated_tokens", 1, 9),
        set_to("1", "generated_tokens", [7]),
        set_to("0", "generated_tokens", [7, 8, 8]),
    ],
    "generated_text": [set_to("0", "generated_text", "7 9"), set_to("0", "input_prompt", "")],
    "logprobs": [
        set_to("0", "logprobs", 1, -0.5 + 1.1 * LOG_PROB_TOLERANCE),
        set_to("0", "generated_logprobs", 0, math.nan),
        set_to("0", "generated_logprobs", [-0.25]),
        set_to("0", "generated_logprobs", [-0.25, -0.5, -1.0]),
        set_to("0", "prompt_logprobs", [-1.0]),
        set_to("0", "top_n_logprobs", 1, "4", -2.5),
        set_to("0", "top_n_logprobs", 1, {"8": -0.5, "5": -3.0}),
        lambda run: run.requests["0"].pop("logprobs"),
    ],
    "counts": [
        set_to("0", "matched_block_count", 1),
        set_to("0", "skipped_prefill_token_count", 1),
        set_to("0", "computed_prefill_token_count", 2),
        set_to("0", "recomputed_token_count", 1),
        set_to("0", "prefill_reasons", {"not_cached": 3}),
        set_to("0", "step_count", 3),
        set_to("0", "status", "FAILED"),
        set_to("0", "finish_reason", "stop"),
        lambda run: run.requests["0"].pop("recomputed_token_count"),
    ],
    "events": [swap_events, lambda run: run.requests["0"]["events"].pop(), lambda run: run.requests["0"].pop("events")],
    "times": [
        set_to("0", "ttft", 0.0),
        set_to("0", "ttft", 2.5),
        set_to("0", "ttft", None),
        set_to("0", "events", 1, "timestamp", 0.5),
    ],
    "system": [
        set_to("lifetime_prefill_token_count", 5),
        lambda run: run.requests.update(lifetime_prefill_token_count=5),
        lambda run: run.requests.pop("async_sched_step_count"),
        set_to("lifetime_skipped_token_count", 1),
        set_to("prefix_cache", {"hits": 1}),
        set_to("geometry", "blocks", 11),
        set_to("model", "another model"),
        lambda run: run.run.pop("lifetime_prefill_token_count"),
        set_to("speculation", {"verification_count": 1}),
    ],
}
EACH_CHANGE = [(metric, change) for metric, changes in CHANGES.items() for change in changes]


@pytest.fixture
def golden() -> Results:
    return golden_values(fresh_run())


def test_an_equal_run_has_no_differences(golden):
    run = fresh_run()
    for file in (run.requests, run.run):
        file["throughput"], file["mem-max-allocated-bytes"] = [9.0], 1
    run.run["version"] = "9.9"
    run.requests["0"]["logprobs"][0] += 0.9 * LOG_PROB_TOLERANCE
    run.requests["0"]["latency"], run.requests["0"]["ttft"] = 20.0, 20.0
    assert differences(golden, run, METRICS) == []


def test_each_metric_has_changes_that_it_sees():
    assert set(CHANGES) == set(METRICS)


@pytest.mark.parametrize(("metric", "change"), EACH_CHANGE)
def test_a_change_is_seen_by_its_metric_alone(golden, metric, change):
    run = fresh_run()
    change(run)
    assert differences(golden, run, [metric])
    assert differences(golden, run, [other for other in METRICS if other != metric]) == []


@pytest.mark.parametrize("metric", METRICS)
def test_a_missing_request_and_a_new_one_are_seen_whatever_is_compared(golden, metric):
    run = fresh_run()
    run.requests["2"] = run.requests.pop("1")
    assert differences(golden, run, [metric]) == ["request 1 is missing", "request 2 has no golden values"]


def test_a_difference_names_place_and_values(golden):
    run = fresh_run()
    run.requests["1"]["generated_tokens"] = [7, 9]
    run.requests["0"]["top_n_logprobs"] = [{"7": -0.26, "9": -2.0}, {"8": -0.5, "4": -3.5}]
    golden.run["prefix_cache"], run.run["prefix_cache"] = {"hits": 3, "slots": 8}, {"hits": 1, "slots": 8}
    assert differences(golden, run, METRICS) == [
        "request 0: top_n_logprobs[0]: 7 is -0.26, golden -0.25; 1 more",
        "request 1: generated_tokens[1] is 9, golden 8",
        "the run: prefix_cache: hits is 1, golden 3",
    ]


@pytest.mark.parametrize("metrics", [[], ["generated_tokens", "throughput"]])
def test_metrics_must_be_known_and_given(golden, metrics):
    """A misspelt metric would compare nothing."""
    with pytest.raises(ValueError, match="known are"):
        differences(golden, fresh_run(), metrics)


def test_written_anew_golden_values_do_not_follow_the_rounding_of_a_cpu(golden):
    run = fresh_run()
    run.requests["0"]["logprobs"] = [-0.250002, -0.5]
    run.requests["0"]["top_n_logprobs"][0]["9"] = -2.000003
    run.requests["1"]["logprobs"] = [-0.252, -0.5]
    run.requests["1"]["finish_reason"] = "stop"
    anew = without_rounding(golden_values(run), golden)
    assert anew.requests["0"] == golden.requests["0"]
    assert anew.requests["1"] == golden.requests["1"] | {"logprobs": [-0.252, -0.5], "finish_reason": "stop"}
    assert without_rounding(golden_values(run), Results({}, {})) == golden_values(run)


@pytest.mark.parametrize("metrics", [("counts", "speed"), ("generated_tokens",), ("counts", "events")])
def test_a_case_has_metrics_that_see_the_cache(metrics):
    with pytest.raises(ValueError, match="hybrid/new"):
        Case("hybrid/new", {}, metrics)
