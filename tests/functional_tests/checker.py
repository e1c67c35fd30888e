"""Golden values: what is kept of a run, and what differs between a fresh run and them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megatron_ext.serving.results import SYSTEM_KEYS

LOG_PROB_TOLERANCE = 1e-3  # absolute, fp32
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
    "prompt_token_count",
    "matched_block_count",
    "skipped_prefill_token_count",
    "computed_prefill_token_count",
    "recomputed_token_count",
    "prefill_reasons",
)
_SYSTEM_VALUES = ("model", "lifetime_prefill_token_count", "lifetime_skipped_token_count", "prefix_cache", "geometry")


def golden_values(results: dict[str, Any]) -> dict[str, Any]:
    """What is stored of a run: no times, no memory, no version."""
    system = {key: results[key] for key in SYSTEM_KEYS if key not in _NOT_STORED}
    return {key: _golden_request(entry) for key, entry in requests(results).items()} | system


def requests(results: dict[str, Any]) -> dict[str, Any]:
    """The entries that are requests."""
    return {key: entry for key, entry in results.items() if key not in SYSTEM_KEYS}


def differences(golden: dict[str, Any], fresh: dict[str, Any], metrics: Sequence[str]) -> list[str]:
    """Where a fresh run differs from the golden values, a line each; empty if it does not.

    Raises:
        ValueError: If `metrics` is empty or has a name that is not in `METRICS`.
    """
    unknown = sorted(set(metrics) - set(METRICS))
    if unknown or not metrics:
        raise ValueError(f"metrics {unknown or 'missing'}; known are {', '.join(METRICS)}")
    expected, got = requests(golden), requests(fresh)
    found = [f"request {key} is missing" for key in expected if key not in got]
    found += [f"request {key} has no golden values" for key in got if key not in expected]
    for key in expected.keys() & got.keys():
        for name in metrics:
            if name in _REQUEST_METRICS:
                found += _REQUEST_METRICS[name](f"request {key}", expected[key], got[key])
    if "system" in metrics:
        found += _unequal("the run", golden, fresh, _SYSTEM_VALUES)
    return sorted(found)


def _unequal(where: str, golden: dict, fresh: dict, keys: Sequence[str]) -> Iterator[str]:
    for key in keys:
        if key not in fresh:
            yield f"{where}: {key} is missing"
        elif golden[key] != fresh[key]:
            yield f"{where}: {key} is {fresh[key]!r}, golden {golden[key]!r}"


def _tokens(where: str, golden: dict, fresh: dict) -> Iterator[str]:
    yield from _unequal(where, golden, fresh, ["generated_tokens"])


def _text(where: str, golden: dict, fresh: dict) -> Iterator[str]:
    yield from _unequal(where, golden, fresh, ["input_prompt", "generated_text"])


def _counts(where: str, golden: dict, fresh: dict) -> Iterator[str]:
    yield from _unequal(where, golden, fresh, _COUNTS)


def _log_probs(where: str, golden: dict, fresh: dict) -> Iterator[str]:
    for key in (*_LOG_PROBS, *_TOP_N):
        if (key in golden) != (key in fresh):
            yield f"{where}: {key} is {'missing' if key in golden else 'new'}"
        elif key in golden:
            yield from _apart(f"{where}: {key}", golden[key], fresh[key])


def _apart(where: str, golden: Any, fresh: Any) -> Iterator[str]:
    """Numbers that differ by more than the tolerance, in lists and objects of the same shape."""
    if isinstance(golden, list) and isinstance(fresh, list) and len(golden) == len(fresh):
        for index, (one, other) in enumerate(zip(golden, fresh, strict=True)):
            yield from _apart(f"{where}[{index}]", one, other)
    elif isinstance(golden, dict) and isinstance(fresh, dict) and golden.keys() == fresh.keys():
        for key in golden:
            yield from _apart(f"{where}[{key}]", golden[key], fresh[key])
    elif isinstance(golden, float) and isinstance(fresh, float):
        if not abs(golden - fresh) <= LOG_PROB_TOLERANCE:  # this way round, NaN differs too
            yield f"{where} is {fresh}, golden {golden}"
    elif golden != fresh:
        yield f"{where} has another shape: {_shape(fresh)}, golden {_shape(golden)}"


def _shape(value: Any) -> str:
    if isinstance(value, list):
        return f"{len(value)} entries"
    return f"keys {sorted(value)}" if isinstance(value, dict) else repr(value)


def _events(where: str, golden: dict, fresh: dict) -> Iterator[str]:
    expected, got = ([event["type"] for event in entry.get("events", ())] for entry in (golden, fresh))
    if expected != got:
        yield f"{where}: events are {' '.join(got)}, golden {' '.join(expected)}"


def _times(where: str, golden: dict, fresh: dict) -> Iterator[str]:
    """Of the fresh run alone: a first token comes after the request and not after its end."""
    ttft, latency = fresh["ttft"], fresh["latency"]
    if ttft is None:
        if golden["generated_tokens"]:
            yield f"{where}: no ttft"
    elif not 0 < ttft <= latency:
        yield f"{where}: ttft {ttft} is not between 0 and the latency {latency}"
    stamps = [event["timestamp"] for event in fresh.get("events", ())]
    if stamps != sorted(stamps):
        yield f"{where}: timestamps of events go back"


_REQUEST_METRICS: dict[str, Callable[[str, dict, dict], Iterator[str]]] = {
    "generated_tokens": _tokens,
    "generated_text": _text,
    "logprobs": _log_probs,
    "counts": _counts,
    "events": _events,
    "times": _times,
}
METRICS = (*_REQUEST_METRICS, "system")


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
