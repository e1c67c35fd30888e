"""How many drafts are worth verifying: by what became of a request's drafts so far, and by what a step costs.

Pure: counts in, counts out, no clock. A request's estimate `a` says how likely a draft comes when those before it came;
its i-th draft then comes with `a**i`, and is one more token of a step. All drafts that could be verified are ranked by
that, and the first so many are taken whose tokens a step are most, for what the step costs (`config.draft_costs`):

    tokens per cost = (R + sum of the m likeliest) / (1 + fixed + each / R * m),  against R / 1 for none

A request whose drafts are not worth it is tried again after 16, 32, ... of its steps, with one draft, which shows when
its text begins to repeat itself. Trials of all requests together cost a hundredth of the steps at most, and what they
bring: they are put off until that is saved up, so that a large batch pays for them no more than a small one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_ext.config.draft_costs import CostTable
from megatron_ext.speculation.drafter import DraftAsk, Drafter

_MEMORY = 4.0  # drafts: what is known from before weighs as much as so many, beside those of a verification
_ASSUMED, _ASSUMED_WEIGHT = 0.5, 2.0  # how likely a draft is taken to come before anything is known, and its weight
FIRST_PAUSE, LONGEST_PAUSE = 16, 1024  # steps
TRIAL_SHARE = 0.01  # of all steps, what trials may cost
_MOST_SAVED = 1.0  # steps


@dataclass(frozen=True)
class Acceptance:
    """What became of one request's drafts.

    Attributes:
        came: Drafts that came, the older ones for less.
        tried: Drafts that could have come: those, and the first one that did not.
        pause: Steps between two trials while drafts are not worth it.
        rested: Steps since the last trial.
    """

    came: float = _ASSUMED * _ASSUMED_WEIGHT
    tried: float = _ASSUMED_WEIGHT
    pause: int = FIRST_PAUSE
    rested: int = 0

    @property
    def likelihood(self) -> float:
        """How likely a draft comes when those before it came."""
        return self.came / self.tried

    @property
    def as_assumption(self) -> Acceptance:
        """What to assume of a request that nothing is known of, if this is known of others."""
        return Acceptance(self.likelihood * _ASSUMED_WEIGHT, _ASSUMED_WEIGHT)

    @property
    def is_due(self) -> bool:
        """Whether it is time for a trial."""
        return self.rested >= self.pause

    def verified(self, drafted: int, accepted: int) -> Acceptance:
        """After a verification of `drafted` drafts, of which the first `accepted` came.

        One draft of a trial that came makes up for much of the past, so that a text that begins to repeat itself has
        its drafts back within a few steps; one that did not doubles the pause.
        """
        kept = min(1.0, _MEMORY / self.tried)
        came, tried = self.came * kept + accepted, self.tried * kept + min(drafted, accepted + 1)
        pause = FIRST_PAUSE if accepted else min(2 * self.pause, LONGEST_PAUSE)
        was_trial = self.is_due
        return Acceptance(came, tried, pause, rested=pause if was_trial and accepted else 0)

    def passed_over(self) -> Acceptance:
        """After a step in which it might have had drafts, and had none that were verified."""
        return replace(self, rested=self.rested + 1)


def allot(likelihoods: Sequence[float], limits: Sequence[int], requests: int, costs: CostTable) -> list[int]:
    """Of each request how many drafts are worth verifying in the next step.

    Args:
        likelihoods: See `Acceptance`.
        limits: At most so many.
        requests: That decode in this step, those without any drafts included.
        costs: Of steps.
    """
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
    allotted = [0] * len(limits)
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
        self._saved = _MOST_SAVED  # steps, for trials
        self._requests = 1  # of the last proposal

    def propose(self, asks: Sequence[DraftAsk]) -> Mapping[int, tuple[int, ...]]:
        """See `Drafter`. How many drafts one request has rests on what became of others' drafts, too."""
        self._requests = max(1, len(asks))
        self._saved = min(_MOST_SAVED, self._saved + TRIAL_SHARE)
        for ask in asks:
            self._known.setdefault(ask.request_id, self._everybody.as_assumption)
        chosen = self._cut_guesses(asks) if self._guesses_are_free else self._asked_for_less(asks)
        for ask in asks:
            if not chosen.get(ask.request_id):
                self._known[ask.request_id] = self._known[ask.request_id].passed_over()
        return chosen

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
        """How many drafts each has: what is worth it, and one for each trial that is due and can be paid for."""
        known = [self._known[ask.request_id] for ask in asks]
        counts = allot([one.likelihood for one in known], limits, len(asks), self._costs)
        row = self._costs.at(self._requests)
        entry = 0.0 if any(counts) else row.fixed
        for i, one in enumerate(known):
            cost = entry + row.each / len(asks)
            if not counts[i] and limits[i] and one.is_due and cost <= self._saved:
                counts[i], entry = 1, 0.0
                self._saved -= cost
        return counts

    def accepted(self, request_id: int, drafted: int, accepted: int) -> None:
        """See `Drafter`."""
        known = self._known.get(request_id, self._everybody.as_assumption)
        if known.is_due:
            self._saved = min(_MOST_SAVED, self._saved + accepted / self._requests)
        self._known[request_id] = known.verified(drafted, accepted)
        self._everybody = self._everybody.verified(drafted, accepted)
        self._drafter.accepted(request_id, drafted, accepted)

    def forget(self, request_id: int) -> None:
        """See `Drafter`."""
        self._known.pop(request_id, None)
        self._drafter.forget(request_id)
