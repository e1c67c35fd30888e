"""The drafter that an engine was built with, put together: who guesses, and how much of it is verified."""

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
    """A drafter with pools of its own, which come and go with the engine's."""

    def reset(self) -> None:
        """Everything that was read is forgotten."""

    def suspend(self) -> None:
        """Free the pools."""

    def resume(self) -> None:
        """Allocate them again."""


class Drafting:
    """A drafter that begins anew with its engine.

    Args:
        config: With a method.
        costs: Of verification, until there are others.
        model: That drafts; None for n-grams.
    """

    def __init__(self, config: SpeculationConfig, costs: CostTable, model: DraftPools | None = None) -> None:
        self._config = config
        self._costs = costs
        self._model = model
        self._drafter = self._made()

    def _made(self) -> Drafter:
        config = self._config
        guesser: Drafter = self._model or NgramDrafter(
            config.speculative_ngram_longest, config.speculative_ngram_shortest
        )
        if not config.speculative_adaptive:
            return guesser
        return AdaptiveDrafter(guesser, self._costs, guesses_are_free=self._model is None)

    @property
    def costs(self) -> CostTable:
        """Of verification."""
        return self._costs

    def use(self, costs: CostTable) -> None:
        """Verification costs something else; whatever is known of requests is forgotten."""
        self._costs = costs
        self.reset()

    def probe(self, drafts: int) -> None:
        """Until the next `use`: each request has so many drafts, whatever becomes of them, for measuring."""
        self.reset()
        self._drafter = _Probe(drafts, self._model)

    # As a drafter

    def propose(self, asks: Sequence[DraftAsk]) -> Mapping[int, tuple[int, ...]]:
        """See `Drafter`."""
        return self._drafter.propose(asks)

    def accepted(self, request_id: int, drafted: int, accepted: int) -> None:
        """See `Drafter`."""
        self._drafter.accepted(request_id, drafted, accepted)

    def forget(self, request_id: int) -> None:
        """See `Drafter`."""
        self._drafter.forget(request_id)

    # With the engine's pools

    def reset(self) -> None:
        """All requests are forgotten."""
        if self._model is not None:
            self._model.reset()
        self._drafter = self._made()

    def suspend(self) -> None:
        """The engine frees its pools."""
        if self._model is not None:
            self._model.suspend()

    def resume(self) -> None:
        """The engine allocates its pools again.

        Raises:
            ConfigError: There is less memory than seemed to be free.
        """
        if self._model is not None:
            self._model.resume()


class _Probe:
    """Proposes the same number of drafts for each request: the draft model's, or the request's last token again.

    Args:
        drafts: How many; 0 is none.
        model: That drafts.
    """

    def __init__(self, drafts: int, model: Drafter | None) -> None:
        self._drafts = drafts
        self._model = model

    def propose(self, asks: Sequence[DraftAsk]) -> Mapping[int, tuple[int, ...]]:
        cut = [replace(ask, limit=min(ask.limit, self._drafts)) for ask in asks if self._drafts]
        if self._model is not None:
            return self._model.propose(cut) if cut else {}
        return {ask.request_id: (ask.tokens[-1],) * ask.limit for ask in cut}

    def accepted(self, request_id: int, drafted: int, accepted: int) -> None:
        pass

    def forget(self, request_id: int) -> None:
        if self._model is not None:
            self._model.forget(request_id)
