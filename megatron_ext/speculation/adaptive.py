"""How many drafts are worth verifying: by what became of a request's drafts so far, and by what a step costs.

Pure: counts in, counts out, no clock. A request's estimate `a` says how likely a draft comes when those before it came;
its i-th draft then comes with `a**i`, and is one more token of a step. All drafts that could be verified are ranked by
that, and the first so many are taken whose tokens a step are most, for what the step costs (`config.draft_costs`):

    tokens per cost = (R + sum of the m likeliest) / (1 + fixed + each / R * m),  against R / 1 for none

A request whose drafts are not worth it is tried with one draft, and again after 32, 64, ... steps, which shows when its
text begins to repeat itself. Trials of all requests together cost a hundredth of the steps at most, and what they
bring: they are put off until that is saved up, so that a large batch pays for them no more than a small one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_ext.config.draft_costs import CostTable
from megatron_ext.speculation.drafter import DraftAsk, Drafter

_MEMORY = 4.0  # drafts: what is known from before weighs as much as so many, beside those of a verification
_ASSUMED, _ASSUMED_WEIGHT = 0.5, 1.0  # how likely a draft is taken to come before anything is known, and its weight
FIRST_PAUSE, LONGEST_PAUSE = 16, 1024  # steps
TRIAL_SHARE = 0.01  # of all steps, what trials may cost
_BEST_DEPTHS = 2.0  # steps, or what a trial of everybody costs; an engine begins with them


@dataclass(frozen=True)
class Acceptance:
    """What became of one request's drafts.

    Attributes:
        came: Drafts that came, the older ones for less.
        tried: Drafts that could have come: those, and the first one that did not.
        pause: Steps between two trials while drafts are not worth it.
        due: The step from which on one may be made.
    """

    came: float = _ASSUMED * _ASSUMED_WEIGHT
    tried: float = _ASSUMED_WEIGHT
    pause: int = FIRST_PAUSE
    due: int = 0

    @property
    def likelihood(self) -> float:
        """How likely a draft comes when those before it came."""
        return self.came / self.tried

    def as_assumption(self, now: int) -> Acceptance:
        """What to assume in step `now` of a request that nothing is known of, if this is known of others."""
        return Acceptance(self.likelihood * _ASSUMED_WEIGHT, _ASSUMED_WEIGHT, FIRST_PAUSE, now)

    def verified(self, drafted: int, accepted: int, now: int) -> Acceptance:
        """After a verification of `drafted` drafts in step `now`, of which the first `accepted` came.

        One draft of a trial that came makes up for much of the past, so that a text that begins to repeat itself has
        its drafts back within a few steps; one that did not doubles the pause.
        """
        kept = min(1.0, _MEMORY / self.tried)
        came, tried = self.came * kept + accepted, self.tried * kept + min(drafted, accepted + 1)
        pause = FIRST_PAUSE if accepted else min(2 * self.pause, LONGEST_PAUSE)
        was_trial = now >= self.due
        return Acceptance(came, tried, pause, due=now if was_trial and accepted else now + pause)


def allot(likelihoods: Sequence[float], limits: Sequence[int], requests: int, costs: CostTable) -> list[int]:
    """Of each request how many drafts are worth verifying in the next step.

    Args:
        likelihoods: See `Acceptance`.
        limits: At most so many.
        requests: That decode in this step, those without any drafts included.
        costs: Of steps.
    """
    allotted = [0] * len(limits)
    if not any(limits):
        return allotted
    row = costs.at(requests)
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


class AdaptiveDrafter:
    """Lets another drafter propose as much as is worth verifying.

    Args:
        drafter: Who proposes.
        costs: Of verification.
        guesses_are_free: Whether proposing costs next to nothing: then it is asked for all, and what it has is cut;
            otherwise it is asked for no more than will be verified.
    """

    def __init__(self, drafter: Drafter, costs: CostTable, *, guesses_are_free: bool) -> None:
        self._drafter = drafter
        self._costs = costs
        self._guesses_are_free = guesses_are_free
        self._known: dict[int, Acceptance] = {}
        self._everybody = Acceptance()  # of all requests so far, the last ones
        self._saved = _BEST_DEPTHS  # steps, for trials
        self._requests = 1  # of the last proposal
        self._now = 0  # proposals so far

    def propose(self, asks: Sequence[DraftAsk]) -> Mapping[int, tuple[int, ...]]:
        """See `Drafter`. How many drafts one request has rests on what became of others' drafts, too."""
        self._now += 1
        self._requests = max(1, len(asks))
        self._save(TRIAL_SHARE)
        for ask in asks:
            if ask.request_id not in self._known:
                self._known[ask.request_id] = self._everybody.as_assumption(self._now)
        return self._cut_guesses(asks) if self._guesses_are_free else self._asked_for_less(asks)

    def _cut_guesses(self, asks: Sequence[DraftAsk]) -> dict[int, tuple[int, ...]]:
        guesses = self._drafter.propose(asks)
        sizes = [min(ask.limit, len(guesses.get(ask.request_id, ()))) for ask in asks]
        counts = zip(asks, self._counts(asks, sizes), strict=True)
        return {ask.request_id: guesses[ask.request_id][:count] for ask, count in counts if count}

    def _asked_for_less(self, asks: Sequence[DraftAsk]) -> dict[int, tuple[int, ...]]:
        counts = zip(asks, self._counts(asks, [ask.limit for ask in asks]), strict=True)
        cut = [replace(ask, limit=count) for ask, count in counts if count]
        return dict(self._drafter.propose(cut)) if cut else {}

    def _counts(self, asks: Sequence[DraftAsk], limits: Sequence[int]) -> list[int]:
        """How many drafts each has: what is worth it, and one for each trial that is due, if they can be paid for."""
        if not any(limits):
            return list(limits)
        known = [self._known[ask.request_id] for ask in asks]
        counts = allot([one.likelihood for one in known], limits, len(asks), self._costs)
        due = [i for i, one in enumerate(known) if limits[i] and not counts[i] and one.due <= self._now]
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
        """See `Drafter`."""
        known, now = self._known.get(request_id) or self._everybody.as_assumption(self._now), self._now
        if now >= known.due:
            self._save(accepted / self._requests)
        self._known[request_id] = known.verified(drafted, accepted, now)
        self._everybody = self._everybody.verified(drafted, accepted, now)
        self._drafter.accepted(request_id, drafted, accepted)

    def forget(self, request_id: int) -> None:
        """See `Drafter`."""
        self._known.pop(request_id, None)
        self._drafter.forget(request_id)
