"""A draft model computes what it would compute of the whole text, whatever was accepted meanwhile (SP-1)."""

from __future__ import annotations

import pytest

from megatron_ext.speculation.drafter import DraftAsk
from tests.unit_tests.support.draft_models import make_draft_model
from tests.unit_tests.support.driver import equal_tokens, make_prompt
from tests.unit_tests.support.models import VOCABULARY


@pytest.fixture
def make(get_oracle):
    """A draft model of a kind, and what its drafts must be."""
    return lambda kind: (make_draft_model(get_oracle, kind), get_oracle(kind))


def drafts_are_expected(found, ask: DraftAsk, oracle) -> None:
    expected = oracle.greedy(ask.tokens, ask.limit)
    drafts = found[ask.request_id]
    assert len(drafts) == ask.limit
    assert equal_tokens(drafts, expected) == ask.limit, (drafts, expected.tokens)


@pytest.mark.parametrize("kind", ["hybrid", "attention_only", "gated_delta_net", "mamba1_only", "short_conv"])
def test_drafts_equal_a_recompute(make, kind):
    """SP-1: drafts equal a recompute for each kind of layer, over full, partial and no rejections; two requests."""
    draft, oracle = make(kind)
    texts = {0: make_prompt(37, seed=1), 1: make_prompt(18, seed=2)}
    for round_, came in enumerate([0, 2, 4, 1, 0]):
        asks = [DraftAsk(i, text, 4 - i) for i, text in texts.items() if i == 0 or round_ % 2 == 0]
        found = draft.propose(asks)
        draft.check()
        for ask in asks:
            drafts_are_expected(found, ask, oracle)
            texts[ask.request_id] += [*found[ask.request_id][:came], (7 * round_ + ask.request_id) % VOCABULARY]


@pytest.mark.parametrize("kind", ["hybrid", "mamba1_only"])
def test_a_text_of_one_token(make, kind):
    """SP-1: a text of one token begins without a state, whatever its slot holds, even another request's."""
    draft, oracle = make(kind)
    for name in range(2):
        ask = DraftAsk(name, make_prompt(1, seed=name), 3)
        drafts_are_expected(draft.propose([ask]), ask, oracle)
        draft.forget(name)


def test_a_state_that_drafts_moved_on_is_another(make, monkeypatch):
    """The negative control: without the kept state the next drafts are wrong."""
    draft, oracle = make("hybrid")
    tokens = make_prompt(37, seed=1)
    draft.propose([DraftAsk(0, tokens, 4)])
    draft._readers[0].live = draft._readers[0].kept  # as if it had never moved
    ask = DraftAsk(0, [*tokens, 3, 5, 8], 4)
    with pytest.raises(AssertionError):
        drafts_are_expected(draft.propose([ask]), ask, oracle)


def test_it_gives_its_pools_back(make):
    """SP-1: a suspend frees the draft model's pools too, and texts are read again afterwards."""
    draft, oracle = make("hybrid")
    ask = DraftAsk(0, make_prompt(37, seed=1), 3)
    draft.propose([ask])
    draft.suspend()
    assert draft._context.pools is None
    draft.resume()
    drafts_are_expected(draft.propose([ask]), ask, oracle)
