"""Figures of answers: percentiles and rates of the complete ones."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from benchmarks.serving.clients import PendingOutput

PERCENTILES = (50, 90, 99)
Figures = dict[str, object]


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The smallest value that so many percent do not exceed (nearest rank); None of nothing."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def figures(answers: Sequence[PendingOutput], seconds: float) -> Figures:
    """Figures of one kind of work, or of all kinds. Times are milliseconds.

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
    """Seconds to the first part of the answer."""
    return answer.arrivals[0] - answer.started


def gaps(answer: PendingOutput) -> list[float]:
    """Seconds between parts of the answer; each is a token, or what characters came with one."""
    return [later - earlier for earlier, later in zip(answer.arrivals, answer.arrivals[1:], strict=False)]


def _spread(seconds: Sequence[float]) -> dict[str, float | None]:
    values = {f"p{percent}": percentile(seconds, percent) for percent in PERCENTILES}
    values["mean"] = sum(seconds) / len(seconds) if seconds else None
    values["max"] = max(seconds, default=None)
    return {name: None if value is None else round(1e3 * value, 3) for name, value in values.items()}
