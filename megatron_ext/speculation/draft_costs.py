"""Costs of verifying drafts, in plain decode steps: fixed by a setting, or fitted to measured steps (SP-6).

A step that decodes R requests costs 1. With d drafts for each of them it costs `1 + fixed(R) + each(R) * d`; drafts for
some requests only cost their share of the last term. A row is R, fixed, each. Between two rows the numbers are
interpolated linearly; outside, the nearest row applies.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter

ASSUMED_COST = 0.3
"""Plain steps that a draft is taken to cost where nothing could be measured."""
_REQUESTS = attrgetter("requests")


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

    def __str__(self) -> str:
        return f"{self.requests} at once {self.fixed:.2f} + {self.each:.2f} a draft"


@dataclass(frozen=True)
class DraftCosts:
    """Rows in increasing order of requests; at least one."""

    rows: tuple[CostRow, ...]

    @classmethod
    def constant(cls, cost: float) -> DraftCosts:
        """Return costs of `cost` plain steps for each draft, whatever the number of requests."""
        return cls((CostRow(1, 0.0, cost),))

    def __str__(self) -> str:
        return "; ".join(map(str, self.rows))

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


def fitted(seconds: Mapping[int, Mapping[int, float]], max_requests: int) -> DraftCosts | None:
    """Fit costs to the seconds of steps with no, few and many drafts of each request; None without such steps.

    Negative costs are noise and become 0. If only one number of drafts was measured, `each` takes all of its cost.
    Between the largest number of requests that was measured and `max_requests`, the cost of a draft is taken to grow
    with the tokens of the step, up to the cost of a plain step.

    Args:
        seconds: Seconds by requests and drafts. Numbers of requests without a step with drafts do not count.
        max_requests: Largest number of requests.
    """
    timed = {requests: times for requests, times in seconds.items() if 0 in times and len(times) > 1}
    rows = [_fitted_row(requests, times) for requests, times in sorted(timed.items())]
    if not rows:
        return None
    last = rows[-1]
    if last.requests < max_requests:
        each = max(last.each, min(1.0, last.each * max_requests / last.requests))
        rows.append(CostRow(max_requests, last.fixed, each))
    return DraftCosts(tuple(rows))


def _fitted_row(requests: int, seconds: Mapping[int, float]) -> CostRow:
    more = {drafts: max(0.0, took / seconds[0] - 1) for drafts, took in seconds.items() if drafts}
    low, high = min(more), max(more)
    each = max(0.0, (more[high] - more[low]) / (high - low)) if high > low else more[low] / low
    return CostRow(requests, max(0.0, more[low] - each * low), each)
