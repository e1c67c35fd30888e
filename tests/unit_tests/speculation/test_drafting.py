"""The drafter of an engine while the costs of verification are measured (SP-6)."""

from __future__ import annotations

from megatron_ext.config.draft_costs import CostTable
from megatron_ext.config.speculation import SpeculationConfig
from megatron_ext.speculation.drafter import DraftAsk
from megatron_ext.speculation.drafting import Drafting

COSTS = CostTable.parse("1:0.1:0.02")
ASKS = [DraftAsk(0, [1, 2], 2), DraftAsk(1, [5], 9)]
NGRAM = {"speculative_method": "ngram", "num_speculative_tokens": 4, "speculative_adaptive": False}


class Counting:
    """Layer that proposes 0, 1, 2, ... up to the requested number; the limits of each proposal are recorded."""

    def __init__(self) -> None:
        self.asked: list[dict[int, int]] = []
        self.resets = 0

    def propose(self, asks):
        self.asked.append({ask.request_id: ask.limit for ask in asks})
        return {ask.request_id: tuple(range(ask.limit)) for ask in asks}

    def reset(self) -> None:
        self.resets += 1


def test_a_probe_drafts_the_given_number_within_each_limit():
    """SP-6: all requests get one number of drafts, except near their end; after `use` the method drafts again."""
    drafting = Drafting(SpeculationConfig(**NGRAM), COSTS)
    drafting.probe(3)
    assert drafting.propose(ASKS) == {0: (2, 2), 1: (5, 5, 5)}
    drafting.probe(0)
    assert drafting.propose(ASKS) == {}
    drafting.use(COSTS)
    assert drafting.propose([DraftAsk(0, [1, 2, 3, 1, 2, 3, 1, 2], 2)])[0][0] == 3


def test_a_probe_asks_the_layer():
    """SP-6: the layer computes the drafts, so that its time is measured as well; it begins without any request."""
    layer = Counting()
    drafting = Drafting(SpeculationConfig(**NGRAM | {"speculative_method": "mtp"}), COSTS, layer)
    drafting.probe(3)
    assert drafting.propose(ASKS) == {0: (0, 1), 1: (0, 1, 2)}
    drafting.probe(0)
    assert drafting.propose(ASKS) == {}
    assert layer.asked == [{0: 2, 1: 3}]
    assert layer.resets == 2
