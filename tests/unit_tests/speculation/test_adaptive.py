"""Number of drafts worth verifying: the rule against trying everything, and the drafter over random texts (SP-6)."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from megatron_ext.speculation.adaptive import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    MAX_IDLE_STEPS,
    AdaptiveDrafter,
    CostRow,
    DraftCosts,
    allot,
    fitted,
)
from megatron_ext.speculation.drafter import DraftRequest


def costs_of(*rows: tuple[int, float, float]) -> DraftCosts:
    return DraftCosts(tuple(CostRow(*row) for row in rows))


CHEAP = costs_of((1, 0.1, 0.02))
DEAR_WHEN_MANY = costs_of((1, 0.2, 0.05), (8, 0.4, 0.3), (32, 0.8, 0.9))


class Knowing:
    """Drafter that proposes as much as requested and records the requests."""

    def __init__(self) -> None:
        self.asked: list[dict[int, int]] = []
        self.forgotten: list[int] = []

    def propose(self, asks):
        self.asked.append({ask.request_id: ask.limit for ask in asks})
        return {ask.request_id: tuple(range(ask.limit)) for ask in asks}

    def accepted(self, request_id, drafted, accepted):
        assert 0 <= accepted <= drafted

    def forget(self, request_id):
        self.forgotten.append(request_id)


def worth(counts, likelihoods, requests, costs) -> float:
    """Tokens of a step for what it costs."""
    row, drafts = costs.at(requests), sum(counts)
    tokens = requests + sum(chance**i for chance, n in zip(likelihoods, counts, strict=True) for i in range(1, n + 1))
    return tokens / (1 + row.fixed * (drafts > 0) + row.each * drafts / requests)


@settings(max_examples=60, deadline=None)
@given(
    likelihoods=st.lists(st.floats(0, 1), min_size=1, max_size=4),
    limits=st.lists(st.integers(0, 3), min_size=4, max_size=4),
    others=st.integers(0, 30),
    row=st.tuples(st.floats(0, 2), st.floats(0, 2)),
)
def test_nothing_is_worth_more(likelihoods, limits, others, row):
    """SP-6: no other distribution of drafts gives more tokens for the cost of its step."""
    limits, requests = limits[: len(likelihoods)], len(likelihoods) + others
    costs = costs_of((1, *row))
    found = allot(likelihoods, limits, requests, costs)
    assert all(0 <= n <= limit for n, limit in zip(found, limits, strict=True))
    every = itertools.product(*(range(limit + 1) for limit in limits))
    best = max(worth(counts, likelihoods, requests, costs) for counts in every)
    assert worth(found, likelihoods, requests, costs) == pytest.approx(best)


def test_large_batches_draft_less():
    """SP-6: drafts are worth it alone, but not beside 31 others, where verifying costs as much as decoding."""
    assert allot([0.8], [4], 1, DEAR_WHEN_MANY) == [4]
    assert allot([0.8] * 32, [4] * 32, 32, DEAR_WHEN_MANY) == [0] * 32
    assert allot([0.3], [4], 1, CHEAP) == [3]
    assert allot([0.05], [4], 1, CHEAP) == [0]
    assert allot([0.9], [4], 1, costs_of((1, 1.0, 0.1))) == [4]  # no single draft pays


class Text:
    """Tokens of a request: what `Knowing` guesses next (0, 1, ...) comes, or does not."""

    def __init__(self) -> None:
        self.tokens = [1]
        self.calls = 0
        self._idle_steps = 0

    def step(self, drafter: AdaptiveDrafter, comes: bool, limit: int = 7) -> int:
        """Take one step; return the number of drafts."""
        if self._idle_steps:
            self._idle_steps, drafts = self._idle_steps - 1, ()
        else:
            self.calls += 1
            drafts = drafter.propose([DraftRequest(0, tuple(self.tokens), limit)]).get(0, ())
            self._idle_steps = drafter.idle_steps
        accepted = len(drafts) if comes else 0
        if drafts:
            drafter.accepted(0, len(drafts), accepted)
        self.tokens += [*drafts[:accepted], 0 if comes and not drafts else 99]
        return len(drafts)


def test_unverified_guesses_are_compared():
    """SP-6: a text whose drafts do not pay has none, and all of K within a few tokens of its first repetition."""
    drafter, text = AdaptiveDrafter(Knowing(), costs_of((1, 0.3, 0.05)), guesses_are_free=True), Text()
    new = [text.step(drafter, comes=False) for _ in range(200)]
    assert sum(count > 0 for count in new[:16]) <= 4
    assert not any(new[16:])
    assert 25 <= text.calls <= 80  # a call in each step of the first eight, and later in every eighth step
    repeated = [text.step(drafter, comes=True) for _ in range(2 * (1 + MAX_IDLE_STEPS) + 8)]
    assert repeated[:3] == [0, 0, 0]  # a chance hit is none
    assert repeated[-1] == 7
    calls = text.calls
    for _ in range(20):
        text.step(drafter, comes=True)
    assert text.calls == calls + 20
    drafter.forget(0)
    assert drafter._unverified == drafter._known == {}


@pytest.mark.parametrize(("requests", "row"), [(8, (0.7, 0.35)), (16, (0.9, 0.3))])
def test_costs_that_keep_it_from_beginning_are_tried(requests, row):
    """SP-6: trials show within few steps that all drafts are accepted, and then there are many drafts."""
    drafter = AdaptiveDrafter(Knowing(), costs_of((1, *row)), guesses_are_free=False)
    counts = []
    for _ in range(300):
        found = drafter.propose([DraftRequest(i, (1,), 7) for i in range(requests)])
        counts.append(sum(map(len, found.values())))
        for i, tokens in found.items():
            if tokens:
                drafter.accepted(i, len(tokens), len(tokens))
    assert counts[0] <= requests
    assert next(i for i, count in enumerate(counts) if count == 7 * requests) < 200
    assert counts[-1] == 7 * requests


@pytest.mark.parametrize("guesses_are_free", [True, False])
@pytest.mark.parametrize("requests", [1, 8, 32])
def test_drafts_that_never_come_cost_little(requests, guesses_are_free):
    """SP-6: rejected drafts cost less than two hundredths of the steps by the table, for any number of requests."""
    drafter = AdaptiveDrafter(Knowing(), DEAR_WHEN_MANY, guesses_are_free=guesses_are_free)
    row, cost, steps = DEAR_WHEN_MANY.at(requests), 0.0, 600
    for step in range(steps):
        found = drafter.propose([DraftRequest(i, (99,) * (1 + step), 4) for i in range(requests)])
        drafts = {i: len(tokens) for i, tokens in found.items() if tokens}
        cost += (row.fixed + row.each * sum(drafts.values()) / requests) if drafts else 0
        for i, count in drafts.items():
            drafter.accepted(i, count, 0)
    assert cost / steps < 0.02


class Drafting(RuleBasedStateMachine):
    """Random requests, answers and ends: what it keeps is of living requests only, and what it proposes is allowed."""

    @initialize(guesses_are_free=st.booleans())
    def begin(self, guesses_are_free):
        self.drafter = AdaptiveDrafter(Knowing(), DEAR_WHEN_MANY, guesses_are_free=guesses_are_free)
        self.living: dict[int, float] = {}  # id -> how likely a draft comes
        self.next = self.length = 0
        self.source = random.Random(5)

    @rule(chance=st.sampled_from([0.0, 0.5, 1.0]))
    def arrive(self, chance):
        self.living[self.next] = chance
        self.next += 1

    @precondition(lambda self: self.living)
    @rule(limit=st.integers(1, 8), steps=st.integers(1, 30))
    def step(self, limit, steps):
        for _ in range(steps):
            self.length += 1
            asks = [DraftRequest(i, (1,) * self.length, limit) for i in self.living]
            drafts = self.drafter.propose(asks)
            assert set(drafts) <= set(self.living)
            for i, tokens in drafts.items():
                assert tokens == tuple(range(len(tokens)))
                assert len(tokens) <= limit
                if tokens:
                    comes = next((n for n in range(len(tokens)) if self.source.random() >= self.living[i]), len(tokens))
                    self.drafter.accepted(i, len(tokens), comes)

    @precondition(lambda self: self.living)
    @rule()
    def end(self):
        oldest = min(self.living)
        del self.living[oldest]
        self.drafter.forget(oldest)

    @invariant()
    def keeps_only_the_living(self):
        assert set(self.drafter._known) | set(self.drafter._unverified) <= set(self.living)
        assert 0 <= self.drafter._saved <= 2
        for known in self.drafter._known.values():
            assert 0 <= known.likelihood <= 1
            assert FIRST_PAUSE <= known.pause <= LONGEST_PAUSE


TestDrafting = Drafting.TestCase
TestDrafting.settings = settings(max_examples=15, stateful_step_count=12, deadline=None)


class TestDraftCosts:
    """Costs of verification, measured or given."""

    def test_between_rows_and_outside(self):
        costs = costs_of((2, 0.2, 0.1), (4, 0.4, 0.3))
        assert costs.at(3) == CostRow(3, pytest.approx(0.3), pytest.approx(0.2))
        assert (costs.at(1), costs.at(9)) == costs.rows
        assert DraftCosts.constant(0.25).at(7) == CostRow(1, 0.0, 0.25)

    def test_fitted_to_measurements(self):
        seconds = {r: {d: 2.0 * r * (1 + 0.3 * (d > 0) + 0.1 * d) for d in (0, 1, 5)} for r in (8, 1)}
        for row, requests in zip(fitted(seconds, 8).rows, (1, 8), strict=True):
            assert (row.requests, row.fixed, row.each) == (requests, pytest.approx(0.3), pytest.approx(0.1))
        (noise,) = fitted({1: {0: 1.0, 1: 0.9, 5: 0.8}}, 1).rows
        assert (noise.fixed, noise.each) == (0, 0)
        (alone,) = fitted({1: {0: 1.0, 1: 1.5}}, 1).rows
        assert (alone.fixed, alone.each) == (0, pytest.approx(0.5))

    def test_steps_that_are_missing(self):
        """SP-6: those of too many requests for the pools, or without drafts in `align` mode."""
        assert fitted({}, 4) is None
        assert fitted({1: {}, 2: {0: 1.0}}, 4) is None
        assert [row.requests for row in fitted({1: {0: 1.0, 1: 1.1}, 2: {0: 1.0}}, 1).rows] == [1]

    @pytest.mark.parametrize(("requests", "each"), [(4, 0.1), (16, 0.4), (64, 1.0)])
    def test_more_requests_than_were_measured(self, requests, each):
        """SP-6: the cost of a draft grows with their number, up to that of a step without drafts."""
        row = fitted({4: {0: 1.0, 1: 1.3, 5: 1.7}}, requests).at(requests)
        assert (row.fixed, row.each) == (pytest.approx(0.2), pytest.approx(each))
        dear = fitted({4: {0: 1.0, 1: 3.0, 5: 9.0}}, requests).at(requests)
        assert dear.each == pytest.approx(1.5)
