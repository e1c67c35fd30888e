"""The drafter of an engine while the costs of verification are measured (SP-6)."""

from __future__ import annotations

from unittest import mock

import pytest

from megatron_ext.config.speculation import SpeculationConfig
from megatron_ext.speculation.drafter import DraftRequest
from megatron_ext.speculation.drafting import Drafting

ASKS = [DraftRequest(0, [1, 2], 2), DraftRequest(1, [5], 9)]
NGRAM = {"speculative_method": "ngram", "num_speculative_tokens": 4, "speculative_adaptive": False}


class Counting:
    """Layer that proposes 0, 1, 2, ... up to the requested number; the limits of each proposal are recorded."""

    def __init__(self) -> None:
        self.asked: list[dict[int, int]] = []

    def propose(self, asks):
        self.asked.append({ask.request_id: ask.limit for ask in asks})
        return {ask.request_id: tuple(range(ask.limit)) for ask in asks}


def test_a_probe_drafts_the_given_number_within_each_limit():
    """SP-6: all requests get one number of drafts, except near their end; after `use` the method drafts again."""
    drafting = Drafting(SpeculationConfig(**NGRAM))
    probe = drafting.probe()
    assert drafting.propose(ASKS) == {}
    probe.drafts = 3
    assert drafting.propose(ASKS) == {0: (2, 2), 1: (5, 5, 5)}
    drafting.use(drafting.costs)
    assert drafting.propose([DraftRequest(0, [1, 2, 3, 1, 2, 3, 1, 2], 2)])[0][0] == 3


def test_idle_steps_end_with_a_reset():
    """SP-6: n-grams that find nothing make the engine's drafter idle, with an adaptive number of drafts only."""
    tokens = list(range(100))
    for is_adaptive in (True, False):
        drafting = Drafting(SpeculationConfig(**NGRAM | {"speculative_adaptive": is_adaptive}))
        idle = []
        for end in range(1, 20):
            drafting.propose([DraftRequest(0, tokens[:end], 2)])
            idle.append(drafting.idle_steps)
        assert idle == ([0] * 7 + [1] * 8 + [2] * 4 if is_adaptive else [0] * 19)
        drafting.reset()
        assert drafting.idle_steps == 0


def test_a_probe_asks_the_layer():
    """SP-6: the layer computes the drafts, so that its time is measured as well."""
    layer = Counting()
    drafting = Drafting(SpeculationConfig(**NGRAM | {"speculative_method": "mtp"}), layer)
    probe = drafting.probe()
    probe.drafts = 3
    assert drafting.propose(ASKS) == {0: (0, 1), 1: (0, 1, 2)}
    probe.drafts = 0
    assert drafting.propose(ASKS) == {}
    assert layer.asked == [{0: 2, 1: 3}]


@pytest.mark.parametrize("event", ["reset", "notice_new_weights", "suspend", "resume"])
def test_the_layer_follows_the_engine(event):
    """SP-10: else it would go on from keys of old weights, or hold memory that was to be free."""
    layer = mock.Mock()
    getattr(Drafting(SpeculationConfig(**NGRAM | {"speculative_method": "mtp"}), layer), event)()
    getattr(layer, event).assert_called_once_with()


@pytest.mark.parametrize(("cost", "drafts"), [(0.0, 4), (0.15, 2), (3.0, 0)])
def test_a_fixed_cost_decides_about_drafts(cost, drafts):
    """SP-6: of a new request, of which each draft is taken to be right half of the time."""
    drafting = Drafting(SpeculationConfig("ngram", 4, speculative_draft_cost=cost))
    found = drafting.propose([DraftRequest(0, [1, 2, 3, 4, 5, 6, 1, 2], 4)])
    assert len(found.get(0, ())) == drafts
