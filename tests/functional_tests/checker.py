"""Golden values: what is kept of a run, and what differs between a fresh run and them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_ext.offline.results import MEGATRON_KEYS

LOG_PROB_TOLERANCE = 1e-3  # absolute, fp32
OUTCOME = ("generated_tokens", "generated_text", "logprobs")  # metrics that the cache must not change
_DECIMALS = 6  # of stored log-probs
_TIMES = ("latency", "ttft")
_NOT_STORED = ("throughput", "mem-max-allocated-bytes", "version")
_LOG_PROBS = ("prompt_logprobs", "generated_logprobs", "logprobs")
_TOP_N = ("top_n_logprobs", "prompt_top_n_logprobs")
_COUNTS = (
    "status",
    "error",
    "finish_reason",
    "step_count",
    "request_step_count",
    "prompt_token_count",
    "matched_block_count",
    "skipped_prefill_token_count",
    "computed_prefill_token_count",
    "recomputed_token_count",
    "prefill_reasons",
)
_KEYS = {
    "generated_tokens": ("generated_tokens",),
    "generated_text": ("input_prompt", "generated_text"),
    "logprobs": (*_LOG_PROBS, *_TOP_N),
    "counts": _COUNTS,
}
"""Keys of a request's entry that a metric compares."""
METRICS = (*_KEYS, "events", "times", "system")
_PASS_VALUES = tuple(key for key in MEGATRON_KEYS if key not in _NOT_STORED)
_SYSTEM_VALUES = (
    "model",
    "lifetime_prefill_token_count",
    "lifetime_skipped_token_count",
    "prefix_cache",
    "speculation",
    "geometry",
)


@dataclass(frozen=True)
class Results:
    """Both files of a run.

    Attributes:
        requests: Entries by request id, and Megatron's counts, as `--output-path` has them.
        run: Counts of the run, as in the file beside it.
    """

    requests: dict[str, Any]
    run: dict[str, Any]

    @property
    def entries(self) -> dict[str, Any]:
        """The entries of requests alone."""
        return {key: entry for key, entry in self.requests.items() if key not in MEGATRON_KEYS}


def golden_values(results: Results) -> Results:
    """Stored part of a run: no times, no memory, no version."""
    counts = {key: results.requests[key] for key in _PASS_VALUES}
    return Results(
        {key: _golden_request(entry) for key, entry in results.entries.items()} | counts,
        {key: value for key, value in results.run.items() if key not in _NOT_STORED},
    )


def without_rounding(fresh: Results, stored: Results) -> Results:
    """`fresh` golden values with the stored log-probs where these are within the tolerance: no diff by another CPU."""
    settled = dict(fresh.requests)
    for key, entry in fresh.entries.items():
        known = stored.entries.get(key, {})
        settled[key] = entry | {
            name: known[name]
            for name in (*_LOG_PROBS, *_TOP_N)
            if name in entry and name in known and not any(_unequal(name, known[name], entry[name], LOG_PROB_TOLERANCE))
        }
    return Results(settled, fresh.run)


def differences(
    golden: Results, fresh: Results, metrics: Sequence[str], tolerance: float = LOG_PROB_TOLERANCE
) -> list[str]:
    """Differences of a fresh run from the golden values, a line each, requests in golden order; empty if equal.

    Args:
        golden: Stored values.
        fresh: Results of a run.
        metrics: Names of the compared metrics.
        tolerance: Absolute tolerance of log-probs.

    Raises:
        ValueError: If `metrics` is empty or has a name that is not in `METRICS`.
    """
    unknown = sorted(set(metrics) - set(METRICS))
    if unknown or not metrics:
        raise ValueError(f"metrics {unknown or 'missing'}; known are {', '.join(METRICS)}")
    expected, got = golden.entries, fresh.entries
    found = [f"request {key} is missing" for key in expected if key not in got]
    found += [f"request {key} has no golden values" for key in got if key not in expected]
    for key in (key for key in expected if key in got):
        where = f"request {key}"
        for name in metrics:
            limit = tolerance if name == "logprobs" else 0.0
            found += _unequal_keys(where, expected[key], got[key], _KEYS.get(name, ()), limit)
        found += _events(where, expected[key], got[key]) if "events" in metrics else ()
        found += _times(where, expected[key], got[key]) if "times" in metrics else ()
    if "system" in metrics:
        found += _unequal_keys("the last pass", golden.requests, fresh.requests, _PASS_VALUES)
        found += _unequal_keys("the run", golden.run, fresh.run, _SYSTEM_VALUES)
    return found


def _unequal_keys(where: str, golden: dict, fresh: dict, keys: Iterable[str], tolerance: float = 0.0) -> Iterator[str]:
    """First difference of each key's value, and the number of others."""
    for key in keys:
        parts = [{key: one[key]} if key in one else {} for one in (golden, fresh)]
        first, *others = list(_unequal(where, *parts, tolerance)) or [None]
        if first is not None:
            yield first + (f"; {len(others)} more" if others else "")


def _unequal(where: str, golden: Any, fresh: Any, tolerance: float) -> Iterator[str]:
    """Values that differ, floats by more than the tolerance, in lists and objects of any depth."""
    if isinstance(golden, dict) and isinstance(fresh, dict):
        for key in golden | fresh:
            if key in golden and key in fresh:
                yield from _unequal(f"{where}: {key}", golden[key], fresh[key], tolerance)
            else:
                yield f"{where}: {key} is {'missing' if key in golden else 'new'}"
    elif isinstance(golden, list) and isinstance(fresh, list):
        for index, (one, other) in enumerate(zip(golden, fresh, strict=False)):
            yield from _unequal(f"{where}[{index}]", one, other, tolerance)
        if len(golden) != len(fresh):
            yield f"{where} has {len(fresh)} entries, golden {len(golden)}"
    elif golden != fresh and not _is_close(golden, fresh, tolerance):
        yield f"{where} is {fresh!r}, golden {golden!r}"


def _is_close(golden: Any, fresh: Any, tolerance: float) -> bool:
    return isinstance(golden, float) and isinstance(fresh, float) and abs(golden - fresh) <= tolerance  # NaN is not


def _events(where: str, golden: dict, fresh: dict) -> Iterator[str]:
    expected, got = ([event["type"] for event in entry.get("events", ())] for entry in (golden, fresh))
    if expected != got:
        yield f"{where}: events are {' '.join(got)}, golden {' '.join(expected)}"


def _times(where: str, golden: dict, fresh: dict) -> Iterator[str]:
    """Check the times of the fresh run alone: a first token comes after the request and not after its end."""
    ttft, latency = fresh["ttft"], fresh["latency"]
    if ttft is None:
        if golden["generated_tokens"]:
            yield f"{where}: no ttft"
    elif not 0 < ttft <= latency:
        yield f"{where}: ttft {ttft} is not between 0 and the latency {latency}"
    stamps = [event["timestamp"] for event in fresh.get("events", ())]
    if stamps != sorted(stamps):
        yield f"{where}: timestamps of events go back"


def _golden_request(entry: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in entry.items() if key not in _TIMES}
    kept |= {key: _rounded(kept[key]) for key in (*_LOG_PROBS, *_TOP_N) if key in kept}
    kept["events"] = [{"type": event["type"], "payload": event["payload"]} for event in kept["events"]]
    return kept


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return None if value is None else round(value, _DECIMALS)
