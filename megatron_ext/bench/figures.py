"""Figures of answers: percentiles and rates of the complete ones."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import cast

from megatron_ext.bench.clients import PendingOutput
from megatron_ext.bench.tables import Figure, Rows

PERCENTILES = (50, 90, 99)
Figures = dict[str, object]


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Return the smallest value that `percent` of the values do not exceed (nearest rank); None without values."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def figures(answers: Sequence[PendingOutput], seconds: float) -> Figures:
    """Return the figures of one kind of work; times are milliseconds.

    Args:
        answers: Answers; failed ones are counted and excluded from all other figures.
        seconds: Total duration.
    """
    whole = [one for one in answers if one.error is None]
    told = [one for one in whole if one.cached_tokens is not None]
    prompt = sum(one.prompt_tokens for one in told)
    generated = sum(one.generated_tokens for one in whole)
    return {
        "requests": len(whole),
        "failed": len(answers) - len(whole),
        "errors": dict(Counter(str(one.error) for one in answers if one.error is not None).most_common(3)),
        "seconds": round(seconds, 3),
        "prompt_tokens": sum(one.prompt_tokens for one in whole),
        "generated_tokens": generated,
        "skipped_share": sum(one.cached_tokens or 0 for one in told) / prompt if prompt else None,
        "generated_per_second": generated / seconds,
        "requests_per_second": len(whole) / seconds,
        "ttft_ms": _spread([first_token(one) for one in whole if one.arrivals]),
        "inter_token_ms": _spread([gap for one in whole for gap in gaps(one)]),
        "end_to_end_ms": _spread([one.ended - one.started for one in whole]),
    }


def first_token(answer: PendingOutput) -> float:
    """Return the seconds to the first part of the answer."""
    return answer.arrivals[0] - answer.started


def gaps(answer: PendingOutput) -> list[float]:
    """Return the seconds between parts of the answer; a part has the characters that a token completes."""
    return [later - earlier for earlier, later in zip(answer.arrivals, answer.arrivals[1:], strict=False)]


def _spread(seconds: Sequence[float]) -> dict[str, float | None]:
    values = {f"p{percent}": percentile(seconds, percent) for percent in PERCENTILES}
    values["mean"] = sum(seconds) / len(seconds) if seconds else None
    values["max"] = max(seconds, default=None)
    return {name: None if value is None else round(1e3 * value, 3) for name, value in values.items()}


_COUNTS = ("requests", "failed", "prompt_tokens", "generated_tokens", "generated_per_second", "requests_per_second")
_TIMES = {"ttft_ms": "first token", "inter_token_ms": "between tokens", "end_to_end_ms": "end to end"}


def rows(told: Mapping[str, Figures]) -> Rows:
    """Return a row for each figure, and a column for each kind of work."""
    counts = {kind: cast("dict[str, Figure]", one) for kind, one in told.items()}
    found: Rows = {name.replace("_", " "): {kind: one[name] for kind, one in counts.items()} for name in _COUNTS}
    shares = {kind: cast("float | None", one["skipped_share"]) for kind, one in told.items()}
    found["skipped, %"] = {kind: None if share is None else 100 * share for kind, share in shares.items()}
    for name, title in _TIMES.items():
        for percentile_name in ("p50", "p90", "p99", "max"):
            spreads = {kind: cast("dict[str, float | None]", one[name]) for kind, one in told.items()}
            found[f"{title} {percentile_name}, ms"] = {kind: one[percentile_name] for kind, one in spreads.items()}
    return found
