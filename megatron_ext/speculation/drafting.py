"""Assembly of the drafter that an engine was built with: source of drafts and limit of their number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from megatron_ext.config.draft_costs import CostTable
from megatron_ext.config.speculation import SpeculationConfig
from megatron_ext.speculation.adaptive import AdaptiveDrafter
from megatron_ext.speculation.drafter import DraftAsk, Drafter
from megatron_ext.speculation.ngram import NgramDrafter


class DraftPools(Drafter, Protocol):
    """Drafter with pools of its own, which are freed and allocated together with the engine's."""

    def reset(self) -> None:
        """Forget everything that was read."""

    def notice_new_weights(self) -> None:
        """Forget what was computed with old weights of the target model."""

    def suspend(self) -> None:
        """Free the pools."""

    def resume(self) -> None:
        """Allocate the pools again."""


class Drafting:
    """Drafter of an engine, reset together with the engine.

    Args:
        config: Speculation config with a method.
        costs: Initial costs of verification.
        layer: Drafter of a layer of multi-token prediction; None for n-grams.
    """

    def __init__(self, config: SpeculationConfig, costs: CostTable, layer: DraftPools | None = None) -> None:
        self._config = config
        self._costs = costs
        self._layer = layer
        self._drafter = self._made()

    def _made(self) -> Drafter:
        config = self._config
        guesser: Drafter = self._layer or NgramDrafter(
            config.speculative_ngram_longest, config.speculative_ngram_shortest
        )
        if not config.speculative_adaptive:
            return guesser
        return AdaptiveDrafter(guesser, self._costs, guesses_are_free=self._layer is None)

    @property
    def costs(self) -> CostTable:
        """Costs of verification."""
        return self._costs

    def use(self, costs: CostTable) -> None:
        """Set new costs of verification, and forget all requests."""
        self._costs = costs
        self.reset()

    def probe(self, drafts: int) -> None:
        """Propose a fixed number of drafts for each request until the next `use`, for measurements."""
        self.reset()
        self._drafter = _Probe(drafts, self._layer)

    # Drafter interface

    def propose(self, asks: Sequence[DraftAsk]) -> Mapping[int, tuple[int, ...]]:
        """Propose drafts; see `Drafter`."""
        return self._drafter.propose(asks)

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


class _Probe:
    """Drafter with a fixed number of drafts: the layer's, or repetitions of the request's last token.

    Args:
        drafts: Number of drafts per request; 0 proposes none.
        layer: Drafter of a layer; None repeats the last token.
    """

    def __init__(self, drafts: int, layer: Drafter | None) -> None:
        self._drafts = drafts
        self._layer = layer

    def propose(self, asks: Sequence[DraftAsk]) -> Mapping[int, tuple[int, ...]]:
        cut = [replace(ask, limit=min(ask.limit, self._drafts)) for ask in asks if self._drafts]
        if self._layer is not None:
            return self._layer.propose(cut) if cut else {}
        return {ask.request_id: (ask.tokens[-1],) * ask.limit for ask in cut}

    def accepted(self, request_id: int, drafted: int, accepted: int) -> None:
        pass

    def forget(self, request_id: int) -> None:
        if self._layer is not None:
            self._layer.forget(request_id)
