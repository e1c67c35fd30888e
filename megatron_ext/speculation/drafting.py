"""Assembly of the drafter that an engine was built with: source of drafts and limit of their number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from megatron_ext.config.speculation import SpeculationConfig
from megatron_ext.speculation.adaptive import ASSUMED_COST, AdaptiveDrafter, DraftCosts
from megatron_ext.speculation.drafter import Drafter, DraftRequest
from megatron_ext.speculation.ngram import NgramDrafter


class Drafting(Drafter):
    """Drafter of an engine, reset together with the engine.

    Args:
        config: Speculation config with a method.
        layer: Drafter of a layer of multi-token prediction; None for n-grams.

    Attributes:
        costs: Costs of verification.
    """

    def __init__(self, config: SpeculationConfig, layer: Drafter | None = None) -> None:
        self._is_adaptive, self._layer = config.speculative_adaptive, layer
        self._guesser: Drafter = layer or NgramDrafter(
            config.speculative_ngram_longest, config.speculative_ngram_shortest
        )
        cost = config.speculative_draft_cost
        self.costs = DraftCosts.constant(ASSUMED_COST if cost is None else cost)
        self.parts = [self._limited()]

    def _limited(self) -> Drafter:
        if not self._is_adaptive:
            return self._guesser
        return AdaptiveDrafter(self._guesser, self.costs, guesses_are_free=self._layer is None)

    def use(self, costs: DraftCosts) -> None:
        """Set new costs of verification, and forget all requests."""
        self.costs = costs
        self.reset()

    def probe(self) -> Probe:
        """Let a probe propose drafts until the next reset."""
        probe = Probe(self._layer)
        self.parts = [probe]
        return probe

    def propose(self, requests: Sequence[DraftRequest]) -> Mapping[int, tuple[int, ...]]:
        """Propose drafts; see `Drafter`."""
        (drafter,) = self.parts
        drafts = drafter.propose(requests)
        self.idle_steps = drafter.idle_steps
        return drafts

    def reset(self) -> None:
        """Forget all requests, and their acceptance of drafts."""
        self._guesser.reset()
        self.parts = [self._limited()]
        self.idle_steps = 0


class Probe(Drafter):
    """Drafter with a fixed number of drafts, for measurements: the layer's, or the request's last token repeated.

    Args:
        layer: Drafter of a layer; None repeats the last token.

    Attributes:
        drafts: Number of drafts of each request; 0 proposes none.
    """

    def __init__(self, layer: Drafter | None) -> None:
        self._layer = layer
        self.parts = [] if layer is None else [layer]
        self.drafts = 0

    def propose(self, requests: Sequence[DraftRequest]) -> Mapping[int, tuple[int, ...]]:
        """Propose as many drafts as each request may have, at most `drafts`; see `Drafter`."""
        cut = [replace(request, limit=min(request.limit, self.drafts)) for request in requests if self.drafts]
        if self._layer is not None:
            return self._layer.propose(cut) if cut else {}
        return {request.request_id: (request.tokens[-1],) * request.limit for request in cut}
