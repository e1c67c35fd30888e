"""Golden values: what is kept of a run, and what differs between a fresh run and them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_ext.offline.results import MEGATRON_KEYS

LOG_PROB_TOLERANCE = 1e-3  # absolute, fp32
OUTCOME = ("generated_tokens", "generated_text", "logprobs")  # metrics that the cache must not change
_NEIGHBOURS = 3  # tokens shown on each side of a difference
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
            if name in entry and name in known and not any(_apart(name, known[name], entry[name]))
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
        for name in metrics:
            if name == "logprobs":
                found += _log_probs(f"request {key}", expected[key], got[key], tolerance)
            elif name in _REQUEST_METRICS:
                found += _REQUEST_METRICS[name](f"request {key}", expected[key], got[key])
    if "system" in metrics:
        found += _unequal("the last pass", golden.requests, fresh.requests, _PASS_VALUES)
        found += _unequal("the run", golden.run, fresh.run, _SYSTEM_VALUES)
    return found


def _unequal(where: str, golden: dict, fresh: dict, keys: Iterable[str]) -> Iterator[str]:
    """Values that differ; of objects only the keys that do."""
    for key in keys:
        if key not in fresh:
            yield f"{where}: {key} is missing"
        elif key not in golden:
            yield f"{where}: {key} is new: {fresh[key]!r}"
        elif isinstance(golden[key], dict) and isinstance(fresh[key], dict):
            yield from _unequal(f"{where}: {key}", golden[key], fresh[key], golden[key] | fresh[key])
        elif golden[key] != fresh[key]:
            yield f"{where}: {key} is {_brief(fresh[key])}, golden {_brief(golden[key])}"


def _brief(value: Any) -> str:
    return f"an object of {len(value)} keys" if isinstance(value, dict) else repr(value)


def _tokens(where: str, golden: dict, fresh: dict) -> Iterator[str]:
    """The first token that differs, between its neighbours."""
    expected, got = golden["generated_tokens"], fresh["generated_tokens"]
    if expected == got:
        return
    lengths = len(expected), len(got)
    first = next((i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b), min(lengths))
    yield (
        f"{where}: generated_tokens[{first}] is {_around(got, first)}, golden {_around(expected, first)}"
        + (f"; {len(got)} tokens, golden {len(expected)}" if len(got) != len(expected) else "")
    )


def _around(tokens: Sequence[int], index: int) -> str:
    """Format tokens as `... 4 5 >6< 7 8 ...`; `>end<` after the last token."""
    first, end = max(0, index - _NEIGHBOURS), index + 1 + _NEIGHBOURS
    here = f">{tokens[index]}<" if index < len(tokens) else ">end<"
    words = [*map(str, tokens[first:index]), here, *map(str, tokens[index + 1 : end])]
    return " ".join(["..."] * (first > 0) + words + ["..."] * (end < len(tokens)))


def _text(where: str, golden: dict, fresh: dict) -> Iterator[str]:
    yield from _unequal(where, golden, fresh, ["input_prompt", "generated_text"])


def _counts(where: str, golden: dict, fresh: dict) -> Iterator[str]:
    yield from _unequal(where, golden, fresh, _COUNTS)


def _log_probs(where: str, golden: dict, fresh: dict, tolerance: float = LOG_PROB_TOLERANCE) -> Iterator[str]:
    for key in (*_LOG_PROBS, *_TOP_N):
        if (key in golden) != (key in fresh):
            yield f"{where}: {key} is {'missing' if key in golden else 'new'}"
        elif key in golden:
            apart = list(_apart(f"{where}: {key}", golden[key], fresh[key], tolerance))
            yield from _summary(apart, tolerance)


def _summary(found: Sequence[tuple[str, float]], tolerance: float) -> Iterator[str]:
    """The first difference, how many more there are, the largest, and what would have been let pass."""
    if not found:
        return
    line, _ = found[0]
    more = f"; {len(found) - 1} more, the largest {max(apart for _, apart in found):.2g}" if len(found) > 1 else ""
    yield f"{line}{more} (tolerance {tolerance:g})"


def _apart(where: str, golden: Any, fresh: Any, tolerance: float = LOG_PROB_TOLERANCE) -> Iterator[tuple[str, float]]:
    """Numbers that differ by more than the tolerance, in lists and objects of the same shape, and by how much."""
    if isinstance(golden, list) and isinstance(fresh, list) and len(golden) == len(fresh):
        for index, (one, other) in enumerate(zip(golden, fresh, strict=True)):
            yield from _apart(f"{where}[{index}]", one, other, tolerance)
    elif isinstance(golden, dict) and isinstance(fresh, dict) and golden.keys() == fresh.keys():
        for key in golden:
            yield from _apart(f"{where}[{key}]", golden[key], fresh[key], tolerance)
    elif isinstance(golden, float) and isinstance(fresh, float):
        if not abs(golden - fresh) <= tolerance:  # this way round, NaN differs too
            yield f"{where} is {fresh}, golden {golden}, {abs(golden - fresh):.2g} apart", abs(golden - fresh)
    elif golden != fresh:
        yield f"{where} has another shape: {_shape(fresh)}, golden {_shape(golden)}", math.inf


def _shape(value: Any) -> str:
    if isinstance(value, list):
        return f"{len(value)} entries"
    return f"keys {sorted(value)}" if isinstance(value, dict) else repr(value)


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
