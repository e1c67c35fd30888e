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
        self._drafter = self._limited()

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
        self._drafter = probe = Probe(self._layer)
        return probe

    def propose(self, requests: Sequence[DraftRequest]) -> Mapping[int, tuple[int, ...]]:
        """Propose drafts; see `Drafter`."""
        drafts = self._drafter.propose(requests)
        self.idle_steps = self._drafter.idle_steps
        return drafts

    def accepted(self, request_id: int, drafted: int, accepted: int) -> None:
        """Pass on the result of a verification; see `Drafter`."""
        self._drafter.accepted(request_id, drafted, accepted)

    def forget(self, request_id: int) -> None:
        """Forget a request; see `Drafter`."""
        self._drafter.forget(request_id)

    def reset(self) -> None:
        """Forget all requests, and their acceptance of drafts."""
        self._guesser.reset()
        self._drafter = self._limited()
        self.idle_steps = 0

    def notice_new_weights(self) -> None:
        """Forget results of old weights; see `Drafter`."""
        self._guesser.notice_new_weights()

    def suspend(self) -> None:
        """Free the layer's pools, together with the engine's."""
        self._guesser.suspend()

    def resume(self) -> None:
        """Allocate the layer's pools again, together with the engine's; see `Drafter`."""
        self._guesser.resume()


class Probe(Drafter):
    """Drafter with a fixed number of drafts, for measurements: the layer's, or the request's last token repeated.

    Args:
        layer: Drafter of a layer; None repeats the last token.

    Attributes:
        drafts: Number of drafts of each request; 0 proposes none.
    """

    def __init__(self, layer: Drafter | None) -> None:
        self._layer = layer
        self.drafts = 0

    def propose(self, requests: Sequence[DraftRequest]) -> Mapping[int, tuple[int, ...]]:
        """Propose as many drafts as each request may have, at most `drafts`; see `Drafter`."""
        cut = [replace(request, limit=min(request.limit, self.drafts)) for request in requests if self.drafts]
        if self._layer is not None:
            return self._layer.propose(cut) if cut else {}
        return {request.request_id: (request.tokens[-1],) * request.limit for request in cut}

    def forget(self, request_id: int) -> None:
        """Forget a request; see `Drafter`."""
        if self._layer is not None:
            self._layer.forget(request_id)
