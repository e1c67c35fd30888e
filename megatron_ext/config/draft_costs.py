"""Cost table of verifying drafts, in plain decode steps (SP-6); a table, since decisions must not depend on clocks.

A step that decodes R requests costs 1. With d drafts for each of them it costs `1 + fixed(R) + each(R) * d`; drafts for
some requests only cost their share of the last term. A row of the table is R, fixed, each. Between two rows the numbers
are interpolated linearly; outside, those of the nearest row apply.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter

from megatron_ext.errors import ConfigError

_FORM = "rows requests:fixed:each separated by commas, as in 1:0.3:0.05,8:0.4:0.1,32:0.5:0.3"
# Default tables by device type. CPU: measured with a small hybrid, rounded up; CUDA: an assumption. Other models need
# measurements of their own.
DEFAULT_COSTS = {
    "cpu": "1:0.3:0.12,2:0.5:0.15,8:0.7:0.35,32:1.2:0.6",
    "cuda": "1:0.1:0.02,8:0.1:0.03,32:0.15:0.06,64:0.2:0.12",
}
LARGEST_COST = 1000.0
_REQUESTS = attrgetter("requests")
MAX_ROWS = 64


@dataclass(frozen=True)
class CostRow:
    """Costs of drafts in steps that decode `requests` requests, in plain steps of R requests.

    Attributes:
        requests: R, the number of decoding requests.
        fixed: Cost of having drafts at all.
        each: Cost of one more draft for each of the R requests.
    """

    requests: int
    fixed: float
    each: float


@dataclass(frozen=True)
class CostTable:
    """Rows in increasing order of requests; at least one."""

    rows: tuple[CostRow, ...]

    def __post_init__(self) -> None:
        numbers = [row.requests for row in self.rows]
        if not 1 <= len(self.rows) <= MAX_ROWS or numbers != sorted(set(numbers)) or numbers[0] < 1:
            raise ConfigError(f"a cost table has 1 to {MAX_ROWS} rows of 1, 2, ... requests, each more than before")
        for row in self.rows:
            if not (0 <= row.fixed <= LARGEST_COST and 0 <= row.each <= LARGEST_COST):
                raise ConfigError(
                    f"a cost table's row for {row.requests} requests costs {row.fixed:g} and {row.each:g}; between 0 "
                    f"and {LARGEST_COST:g} plain steps would do"
                )

    @classmethod
    def parse(cls, text: str) -> CostTable:
        """Parse a table from command-line text or a file.

        Raises:
            ConfigError: The text is not a valid table.
        """
        return cls(tuple(_row(words) for words in text.replace("\n", ",").split(",") if words.strip()))

    @classmethod
    def is_one(cls, text: str) -> bool:
        """Return whether a text is a table, not the name of a file with one."""
        return ":" in text

    def __str__(self) -> str:
        return ",".join(f"{row.requests}:{row.fixed:.4g}:{row.each:.4g}" for row in self.rows)

    def at(self, requests: int) -> CostRow:
        """Return the costs in steps that decode `requests` requests, interpolated between rows."""
        rows = self.rows
        i = bisect_left(rows, requests, key=_REQUESTS)
        if i == len(rows) or rows[i].requests == requests or i == 0:
            return rows[min(i, len(rows) - 1)]
        low, high = rows[i - 1], rows[i]
        share = (requests - low.requests) / (high.requests - low.requests)
        return CostRow(
            requests, low.fixed + share * (high.fixed - low.fixed), low.each + share * (high.each - low.each)
        )


def _row(words: str) -> CostRow:
    try:
        requests, fixed, each = words.split(":")
        return CostRow(int(requests), float(fixed), float(each))
    except ValueError:
        raise ConfigError(f"{words.strip()[:60]!r} is not a row of a cost table; give {_FORM}") from None


@dataclass(frozen=True)
class Timing:
    """Measured time of a step with R requests, each with the same number of drafts."""

    requests: int
    drafts: int
    seconds: float


def fitted(timings: Iterable[Timing]) -> CostTable:
    """Fit a cost table to measured steps: for each number of requests without drafts, and with few and many drafts.

    Negative costs are noise and become 0. If only one number of drafts was measured, `each` takes all of its cost.

    Raises:
        ConfigError: A number of requests was measured only without drafts, or only with drafts.
    """
    by_requests: dict[int, dict[int, float]] = {}
    for one in timings:
        by_requests.setdefault(one.requests, {})[one.drafts] = one.seconds
    rows = []
    for requests, seconds in sorted(by_requests.items()):
        plain = seconds.pop(0, 0.0)
        if not seconds or plain <= 0:
            raise ConfigError(f"steps of {requests} requests need measurements without and with drafts")
        low, high = min(seconds), max(seconds)
        more = {drafts: max(0.0, took / plain - 1) for drafts, took in seconds.items()}
        each = max(0.0, (more[high] - more[low]) / (high - low)) if high > low else more[low] / low
        rows.append(CostRow(requests, max(0.0, more[low] - each * low), each))
    return CostTable(tuple(rows))
