"""N-grams beside another drafter: a rule on texts, against a count over the whole text, and numbers of drafts (SP-20).

`test_multi_token_lives.py` has the same beside a layer of multi-token prediction.
"""

from __future__ import annotations

import itertools
import random

import pytest

from megatron_ext.config.draft_costs import CostTable
from megatron_ext.config.speculation import SpeculationConfig
from megatron_ext.speculation.adaptive import AdaptiveDrafter
from megatron_ext.speculation.drafter import DraftAsk
from megatron_ext.speculation.drafting import Drafting
from megatron_ext.speculation.trusted_ngrams import GuessRecord, NgramsBeside

PASSAGE = list(range(100, 112))
CHEAP, DEAR = CostTable.parse("1:0.1:0.02"), CostTable.parse("1:5:5")


class Head:
    """Drafter whose drafts are negative; what it is told is recorded."""

    def __init__(self) -> None:
        self.asked: list[dict[int, int]] = []
        self.told: list[tuple[int, int, int]] = []
        self.forgotten: list[int] = []

    def propose(self, asks):
        self.asked.append({ask.request_id: ask.limit for ask in asks})
        return {ask.request_id: (-1,) * ask.limit for ask in asks}

    def accepted(self, request_id, drafted, accepted):
        self.told.append((request_id, drafted, accepted))

    def forget(self, request_id):
        self.forgotten.append(request_id)

    def reset(self):
        pass


def expected(tokens: list[int], limit: int) -> tuple[int, ...] | None:
    """The trusted guess at the end of a text that came token by token, by searching the text at each of its ends."""

    def guess(end: int) -> list[int]:
        for begin in range(end - 5, -1, -1):
            if tokens[begin : begin + 4] == tokens[end - 4 : end]:
                found = tokens[begin + 4 : end]
                return list(itertools.islice(itertools.cycle(found), limit))
        return []

    right = judged = 0
    for end in range(1, len(tokens)):
        if found := guess(end):
            judged, right = judged + 1, right + (found[0] == tokens[end])
    last = guess(len(tokens))
    return tuple(last) if last and judged and right >= 0.8 * judged else None


@pytest.mark.parametrize("seed", range(6))
def test_trusted_guesses_are_those_of_a_search(seed):
    """SP-20: of random texts with repetitions, an n-gram of four that was right in four of five guesses before."""
    source, record, tokens, found = random.Random(seed), GuessRecord((4,)), [], []
    while len(tokens) < 400:
        part = PASSAGE[: source.choice([3, 12, 12, 12])] if source.random() < 0.8 else [source.randrange(5)]
        for token in part:
            tokens.append(token)
            guess = record.guess(tokens, 3)
            found.append(None if guess is None else guess.tokens)
            assert found[-1] == expected(tokens, 3)
    assert 0.05 < sum(guess is not None for guess in found) / len(found) < 0.95


def test_a_guess_is_judged_up_to_its_first_wrong_token():
    """SP-20: of several tokens that came in one step, those after a wrong one say nothing."""
    record = GuessRecord((4,))
    tokens = [*PASSAGE, *PASSAGE[:4]]
    assert record.guess(tokens, 4) is None
    tokens += [*PASSAGE[4:6], 7, PASSAGE[7], *PASSAGE[:4]]
    assert record.guess(tokens, 4) is None  # two of three
    tokens += PASSAGE[4:6]
    assert record.guess(tokens, 2).likelihood == 0.8  # four of five
    assert record.guess(tokens, 2).tokens == (7, PASSAGE[7])
    assert record.guess(tokens, 1).tokens == (7,)


@pytest.mark.parametrize("length", [3, 4])
def test_shorter_matches_are_not_used(length):
    """SP-20: words that recur with another continuation match with three tokens, and are left to the head."""
    drafter, tokens = NgramsBeside(Head()), list(PASSAGE)
    for other in range(3):
        tokens += PASSAGE[:length]
        drafter.propose([DraftAsk(0, tokens, 1)])
        tokens += [PASSAGE[length], 2 * other, 2 * other + 1]
    drafts = drafter.propose([DraftAsk(0, [*tokens, *PASSAGE[:length]], 1)])
    assert drafts[0] == (-1 if length == 3 else PASSAGE[length],)


def trusting(adaptive: CostTable | None = None) -> tuple[Head, NgramsBeside | AdaptiveDrafter, list[int]]:
    """A head, the drafter beside it, and a text of request 0 whose n-gram is trusted by now."""
    head = Head()
    drafter = NgramsBeside(head)
    if adaptive is not None:
        drafter = AdaptiveDrafter(drafter, adaptive, guesses_are_free=False)
    tokens = [*PASSAGE, *PASSAGE[:4]]
    drafter.propose([DraftAsk(0, tokens, 4)])
    head.asked.clear()
    return head, drafter, [*tokens, *PASSAGE[4:8]]


def test_the_head_computes_for_the_other_requests_only():
    """SP-20: one request repeats itself and the other does not; each has its own guesses."""
    head, drafter, tokens = trusting()
    drafts = drafter.propose([DraftAsk(0, tokens, 3), DraftAsk(1, [1, 2, 3], 2)])
    assert drafts == {0: tuple(PASSAGE[8:11]), 1: (-1, -1)}
    assert head.asked == [{1: 2}]
    drafter.propose([DraftAsk(0, tokens, 3)])
    assert head.asked == [{1: 2}]
    drafter.forget(0)
    assert head.forgotten == [0]
    assert drafter.propose([DraftAsk(0, tokens, 3)]) == {0: (-1,) * 3}


def test_adaptive_counts_of_the_head_are_its_own():
    """SP-20, SP-6: accepted n-grams do not make the head's drafts likelier; its rejected ones do not stop n-grams."""
    _, drafter, tokens = trusting(CHEAP)
    for _ in range(30):
        drafter.propose([DraftAsk(1, [9], 4)])
        drafter.accepted(1, 1, 0)
    asks = [DraftAsk(0, tokens, 4), DraftAsk(1, [9], 4)]
    assert drafter.propose(asks) == {0: tuple(PASSAGE[8:12])}
    for _ in range(10):
        drafter.accepted(0, 4, 4)
    assert drafter.propose(asks) == {0: tuple(PASSAGE[8:12])}
    assert drafter.propose([DraftAsk(2, [9], 4)]).get(2, ()) in {(), (-1,)}


def test_adaptive_cuts_n_grams_that_do_not_pay():
    """SP-20, SP-6: where verification costs more than it gives a sure guess is not verified, nor tried."""
    head, drafter, tokens = trusting(DEAR)
    head.told.clear()
    for _ in range(3000):
        assert drafter.propose([DraftAsk(0, tokens, 4)]) == {}
    assert head.asked == []


@pytest.mark.parametrize("adaptive", [False, True])
def test_the_method_builds_it_around_the_layer(adaptive):
    """SP-20: `mtp_ngram`, with the number of drafts fixed or chosen; `mtp` has no n-grams."""
    _, _, tokens = trusting()
    for method, drafts in (("mtp_ngram", tuple(PASSAGE[8:11])), ("mtp", (-1,) * 3)):
        config = SpeculationConfig(method, 4, speculative_adaptive=adaptive)
        drafting = Drafting(config, CostTable.parse("1:0:0"), Head())
        assert config.has_prediction
        drafting.propose([DraftAsk(0, tokens[:-4], 3)])
        assert drafting.propose([DraftAsk(0, tokens, 3)])[0] == drafts
