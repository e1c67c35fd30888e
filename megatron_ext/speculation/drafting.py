"""Assembly of the drafter that an engine was built with: source of drafts and limit of their number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from megatron_ext.config.speculation import SpeculationConfig
from megatron_ext.speculation.adaptive import ASSUMED_COST, AdaptiveDrafter, DraftCosts
from megatron_ext.speculation.drafter import Drafter, DraftRequest
from megatron_ext.speculation.ngram import NgramDrafter


class DraftPools(Drafter, Protocol):
    """Drafter with pools of its own, which are freed and allocated together with the engine's."""

    def reset(self) -> None:
        """Forget everything that was read."""

    def notice_new_weights(self) -> None:
        """Forget all results of the target model's old weights."""

    def suspend(self) -> None:
        """Free the pools."""

    def resume(self) -> None:
        """Allocate the pools again."""


class Drafting:
    """Drafter of an engine, reset together with the engine.

    Args:
        config: Speculation config with a method.
        layer: Drafter of a layer of multi-token prediction; None for n-grams.

    Attributes:
        costs: Costs of verification.
    """

    def __init__(self, config: SpeculationConfig, layer: DraftPools | None = None) -> None:
        self._config = config
        self._layer = layer
        cost = config.speculative_draft_cost
        self.costs = DraftCosts.constant(ASSUMED_COST if cost is None else cost)
        self._drafter = self._made()

    def _made(self) -> Drafter:
        config = self._config
        guesser: Drafter = self._layer or NgramDrafter(
            config.speculative_ngram_longest, config.speculative_ngram_shortest
        )
        if not config.speculative_adaptive:
            return guesser
        return AdaptiveDrafter(guesser, self.costs, guesses_are_free=self._layer is None)

    def use(self, costs: DraftCosts) -> None:
        """Set new costs of verification, and forget all requests."""
        self.costs = costs
        self.reset()

    def probe(self) -> Probe:
        """Let a probe propose drafts until the next reset."""
        self._drafter = probe = Probe(self._layer)
        return probe

    # Drafter interface

    def propose(self, requests: Sequence[DraftRequest]) -> Mapping[int, tuple[int, ...]]:
        """Propose drafts; see `Drafter`."""
        return self._drafter.propose(requests)

    def accepted(self, request_id: int, drafted: int, accepted: int) -> None:
        """Pass on the result of a verification; see `Drafter`."""
        self._drafter.accepted(request_id, drafted, accepted)

    def forget(self, request_id: int) -> None:
        """Forget a request; see `Drafter`."""
        self._drafter.forget(request_id)

    # Life of the pools

    def reset(self) -> None:
        """Forget all requests."""
        if self._layer is not None:
            self._layer.reset()
        self._drafter = self._made()

    def notice_new_weights(self) -> None:
        """Forget what the drafter has computed with old weights of the target model."""
        if self._layer is not None:
            self._layer.notice_new_weights()

    def suspend(self) -> None:
        """Free the layer's pools, together with the engine's."""
        if self._layer is not None:
            self._layer.suspend()

    def resume(self) -> None:
        """Allocate the layer's pools again, together with the engine's.

        Raises:
            ConfigError: There is less memory than seemed to be free.
        """
        if self._layer is not None:
            self._layer.resume()


class Probe:
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

    def accepted(self, request_id: int, drafted: int, accepted: int) -> None:
        """Ignore the result."""

    def forget(self, request_id: int) -> None:
        """Forget a request; see `Drafter`."""
        if self._layer is not None:
            self._layer.forget(request_id)
