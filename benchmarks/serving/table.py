"""The figures as rows of text: a column for each kind of work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from benchmarks.serving.figures import Figures

_COUNTS = ("requests", "failed", "prompt_tokens", "generated_tokens")
_RATES = ("generated_per_second", "requests_per_second")
_TIMES = {"ttft_ms": "first token, ms", "inter_token_ms": "between tokens, ms", "end_to_end_ms": "end to end, ms"}
_SHOWN = ("p50", "p90", "p99", "max")
UNKNOWN = "-"


def rows(told: Mapping[str, Figures]) -> list[list[str]]:
    """The head, and a row for each figure."""
    found = [["", *told]]
    found += [[name.replace("_", " "), *(str(one[name]) for one in told.values())] for name in _COUNTS]
    found.append(["skipped share", *(_share(one["skipped_share"]) for one in told.values())])
    found += [[name.replace("_", " "), *(_number(one[name]) for one in told.values())] for name in _RATES]
    for name, title in _TIMES.items():
        spreads = [cast("dict[str, float | None]", one[name]) for one in told.values()]
        found.append([f"{title}: {' / '.join(_SHOWN)}", *(_spread(one) for one in spreads)])
    return found


def _spread(values: Mapping[str, float | None]) -> str:
    return " / ".join(_number(values[name]) for name in _SHOWN)


def _number(value: object) -> str:
    return UNKNOWN if not isinstance(value, (int, float)) else f"{value:,.1f}"


def _share(value: object) -> str:
    return UNKNOWN if not isinstance(value, (int, float)) else f"{100 * value:.1f} %"
