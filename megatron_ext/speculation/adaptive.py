"""Adaptive number of drafts: by the acceptance of a request's drafts so far and by the cost of a step.

The computation is pure: counts in, counts out, no clock. A request's estimate `a` is the probability that a draft is
accepted, given that those before it were; its i-th draft is then accepted with probability `a**i`, and adds one more
token to a step. All drafts that could be verified are ranked by this probability, and the first m are taken that give
the most tokens for the cost of the step (`DraftCosts`):

    tokens per cost = (R + sum of the m likeliest) / (1 + fixed + each / R * m),  against R / 1 for none

Guesses that cost nothing (prompt lookup) are made in each step, verified or not, and the next token shows whether the
first guess was right; so a text that begins to repeat itself has drafts after a few tokens. A drafter that costs time
is tried: a request whose drafts do not pay gets one draft, and again after 32, 64, ... steps. Trials of all requests
together cost at most a hundredth of the steps, plus their own gains: they are postponed until that much is saved, so
that a large batch pays no more for them than a small one.

Looking for drafts takes time, too: after calls in a row that led to nothing the drafter is idle for some steps.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from megatron_ext.speculation.drafter import Drafter, DraftRequest

ASSUMED_COST = 0.3
"""Plain steps that a draft is taken to cost where nothing could be measured."""
_REQUESTS = attrgetter("requests")
_MEMORY = 4.0  # drafts: weight of all earlier results relative to the results of one verification
_UNVERIFIED_WEIGHT = 0.25  # of a guess that no step verified: a chance hit alone must not call for drafts
_ASSUMED, _ASSUMED_WEIGHT = 0.5, 1.0  # prior probability of acceptance, and its weight
FIRST_PAUSE, LONGEST_PAUSE = 16, 1024  # steps
TRIAL_SHARE = 0.01  # maximum share of all steps that trials may cost
CALLS_PER_IDLE_STEP, MAX_IDLE_STEPS = 8, 7  # calls in a row without drafts that add an idle step; steps after a call
_BEST_DEPTHS = 2.0  # steps, or the cost of a trial of all requests; initial savings


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
    """Costs of verifying drafts, in plain decode steps: fixed by a setting, or fitted to measured steps (SP-6).

    A step that decodes R requests costs 1. With d drafts for each of them it costs `1 + fixed(R) + each(R) * d`; drafts
    for some requests only cost their share of the last term. Rows are in increasing order of requests, at least one;
    between two rows the numbers are interpolated linearly, and outside the nearest row applies.
    """

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


@dataclass(frozen=True)
class Acceptance:
    """Acceptance statistics of one request's drafts.

    Attributes:
        accepted_sum: Accepted drafts, the older ones with less weight.
        tried_sum: Drafts that could have been accepted: the accepted ones, and the first rejected one.
        pause: Steps between two trials while drafts do not pay.
        due: First step in which a trial is allowed.
    """

    accepted_sum: float = _ASSUMED * _ASSUMED_WEIGHT
    tried_sum: float = _ASSUMED_WEIGHT
    pause: int = FIRST_PAUSE
    due: int = 0

    @property
    def likelihood(self) -> float:
        """Probability that a draft is accepted, given that those before it were."""
        return self.accepted_sum / self.tried_sum

    def as_assumption(self, now: int) -> Acceptance:
        """Return the prior for an unknown request in step `now`, given this estimate from other requests."""
        return Acceptance(self.likelihood * _ASSUMED_WEIGHT, _ASSUMED_WEIGHT, FIRST_PAUSE, now)

    def verified(self, drafted: int, accepted: int, now: int) -> Acceptance:
        """Return the statistics after step `now` verified `drafted` drafts and accepted the first `accepted`.

        One accepted draft of a trial outweighs much of the past, so that a text that begins to repeat itself has its
        drafts back within a few steps; a rejected one doubles the pause.
        """
        pause = FIRST_PAUSE if accepted else min(2 * self.pause, LONGEST_PAUSE)
        due = now if accepted and now >= self.due else now + pause
        return replace(self._counted(accepted, min(drafted, accepted + 1)), pause=pause, due=due)

    def compared(self, is_right: bool) -> Acceptance:
        """Return the statistics after the first token of a guess that was not verified is known."""
        return self._counted(_UNVERIFIED_WEIGHT * is_right, _UNVERIFIED_WEIGHT)

    def _counted(self, accepted: float, tried: float) -> Acceptance:
        kept = min(1.0, _MEMORY / self.tried_sum)
        return replace(self, accepted_sum=self.accepted_sum * kept + accepted, tried_sum=self.tried_sum * kept + tried)


def allot(likelihoods: Sequence[float], limits: Sequence[int], requests: int, costs: DraftCosts) -> list[int]:
    """Return the number of drafts of each request that is worth verifying in the next step.

    Args:
        likelihoods: Acceptance probability of each request; see `Acceptance`.
        limits: Maximum number of drafts of each request.
        requests: Number of requests that decode in this step, including those without drafts.
        costs: Costs of steps.
    """
    allotted = [0] * len(limits)
    if not any(limits):
        return allotted
    row = costs.at(requests)
    if sum(limits) * (max(likelihoods) - row.each) <= requests * row.fixed:  # not even if all were the likeliest
        return allotted
    ranked = sorted(
        ((chance**i, -i, which) for which, chance in enumerate(likelihoods) for i in range(1, limits[which] + 1)),
        reverse=True,
    )
    taken, tokens, best = 0, float(requests), float(requests)
    for count, (gain, _, _) in enumerate(ranked, start=1):
        tokens += gain
        worth = tokens / (1 + row.fixed + row.each * count / requests)
        if worth > best:
            taken, best = count, worth
    for _, _, which in ranked[:taken]:
        allotted[which] += 1
    return allotted


class AdaptiveDrafter(Drafter):
    """Drafter that limits the proposals of another drafter to the number worth verifying.

    Args:
        drafter: Drafter that makes the proposals.
        costs: Costs of verification.
        guesses_are_free: True if proposing costs next to nothing: then the maximum is requested and cut afterwards;
            otherwise no more is requested than will be verified.
    """

    def __init__(self, drafter: Drafter, costs: DraftCosts, *, guesses_are_free: bool) -> None:
        self._drafter = drafter
        self.parts = [drafter]
        self._costs = costs
        self._guesses_are_free = guesses_are_free
        self._known: dict[int, Acceptance] = {}
        self._unverified: dict[int, tuple[int, int]] = {}  # first token of a guess that was cut away, and its position
        self._all_requests = Acceptance()  # over the latest results of all requests
        self._saved = _BEST_DEPTHS  # steps, for trials
        self._requests = 1  # of the last proposal
        self._now = 0  # steps so far
        self._fruitless_calls = 0  # in a row, without drafts to verify and without a guess that came true
        self.idle_steps = 0

    def propose(self, requests: Sequence[DraftRequest]) -> Mapping[int, tuple[int, ...]]:
        """Propose drafts; see `Drafter`. The number for one request depends on the acceptance of others, too."""
        elapsed = 1 + self.idle_steps
        self._now += elapsed
        self._requests = max(1, len(requests))
        for request in requests:
            if request.request_id not in self._known:
                self._known[request.request_id] = self._all_requests.as_assumption(self._now)
        self._fruitless_calls += 1
        drafts = self._cut_guesses(requests) if self._guesses_are_free else self._asked_for_less(requests, elapsed)
        if drafts:
            self._fruitless_calls = 0
        self.idle_steps = min(MAX_IDLE_STEPS, self._fruitless_calls // CALLS_PER_IDLE_STEP)
        return drafts

    def _cut_guesses(self, requests: Sequence[DraftRequest]) -> dict[int, tuple[int, ...]]:
        row = self._costs.at(len(requests))
        can_pay = sum(request.limit for request in requests) * (1 - row.each) > len(requests) * row.fixed
        came_true = [self._compare(request) for request in requests]
        if can_pay and any(came_true):
            self._fruitless_calls = 0
        guesses = self._drafter.propose(requests)
        found = [guesses.get(request.request_id, ())[: request.limit] for request in requests]
        likelihoods = [self._known[request.request_id].likelihood for request in requests]
        drafts = {}
        for request, guess, count in zip(
            requests, found, allot(likelihoods, [len(one) for one in found], len(requests), self._costs), strict=True
        ):
            if count:
                drafts[request.request_id] = guess[:count]
            elif guess:
                self._unverified[request.request_id] = len(request.tokens), guess[0]
        return drafts

    def _compare(self, request: DraftRequest) -> bool:
        """Compare the last guess with the token that came, if no step verified it; return whether it came true."""
        name = request.request_id
        position, token = self._unverified.pop(name, (len(request.tokens), 0))
        if position >= len(request.tokens):
            return False
        is_right = request.tokens[position] == token
        self._known[name] = self._known[name].compared(is_right)
        self._all_requests = self._all_requests.compared(is_right)
        return is_right

    def _asked_for_less(self, requests: Sequence[DraftRequest], elapsed: int) -> dict[int, tuple[int, ...]]:
        self._save(TRIAL_SHARE * elapsed)
        counts = zip(requests, self._counts(requests), strict=True)
        cut = [replace(request, limit=count) for request, count in counts if count]
        return dict(self._drafter.propose(cut)) if cut else {}

    def _counts(self, requests: Sequence[DraftRequest]) -> list[int]:
        """Return the number of drafts per request: as many as should save time, or one for a due trial that fits."""
        known = [self._known[request.request_id] for request in requests]
        limits = [request.limit for request in requests]
        counts = allot([one.likelihood for one in known], limits, len(requests), self._costs)
        due = [i for i, one in enumerate(known) if not counts[i] and one.due <= self._now]
        row = self._costs.at(self._requests)
        cost = (0.0 if any(counts) else row.fixed) + row.each * len(due) / self._requests
        if due and cost <= self._saved:
            self._saved -= cost
            for i in due:
                counts[i] = 1
        return counts

    def _save(self, steps: float) -> None:
        row = self._costs.at(self._requests)
        self._saved = min(max(_BEST_DEPTHS, row.fixed + row.each), self._saved + steps)

    def accepted(self, request_id: int, drafted: int, accepted: int) -> None:
        """Update the statistics; see `Drafter`."""
        known, now = self._known.get(request_id) or self._all_requests.as_assumption(self._now), self._now
        if now >= known.due:
            self._save(accepted / self._requests)
        self._known[request_id] = known.verified(drafted, accepted, now)
        self._all_requests = self._all_requests.verified(drafted, accepted, now)
        super().accepted(request_id, drafted, accepted)

    def forget(self, request_id: int) -> None:
        """Drop the statistics of a request; see `Drafter`."""
        self._known.pop(request_id, None)
        self._unverified.pop(request_id, None)
        super().forget(request_id)
