"""Drafts of layers of multi-token prediction, which read the target model's hidden states (SP-10, SP-14).

The layer reads token p together with the target's hidden state after token p - 1, and so predicts token p + 1: what it
computes at p depends on tokens up to p. From its last output and its own draft it goes on greedily. Seen so it is a
draft model (`DraftModelDrafter`): it reads the accepted tokens, keeps keys, values and states of its own after them,
and drafts on top of a copy. It shares nothing between requests.

Its text begins where hidden states are there: with the last ones of the prompt, at most as many as are kept, and after
a hit with the first computed token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from megatron_ext.scheduling.step import ScheduledStep
from megatron_ext.speculation.draft_model import DraftModelDrafter, DraftRoom
from megatron_ext.speculation.drafter import DraftAsk


@dataclass(frozen=True)
class ChunkInput:
    """Input of a chunk beside its tokens.

    Attributes:
        position: Position of its first token in the request; a chunk counts from the first token that the layer read.
        drafts: 0 for hidden states of the target model; n for the layer's output before the n-th draft.
    """

    position: int
    drafts: int


class KeptStates(Protocol):
    """Hidden states of the target model, of the last tokens of each request."""

    def kept(self, request_id: int) -> range:
        """Return the positions of a request whose hidden states are kept; empty if none are."""

    def forget(self, request_id: int) -> None:
        """Drop a request's hidden states."""

    def reset(self) -> None:
        """Drop all hidden states."""


ExecuteLayer = Callable[[ScheduledStep, Mapping[int, ChunkInput]], Mapping[int, int]]
"""Computes a step of the layer, with the input of each request; returns request id -> token sampled for its chunk."""


class MultiTokenDrafter:
    """Drafter that proposes the greedy continuation of a layer of multi-token prediction.

    Args:
        room: Capacity of the layer's pools.
        execute: Function that computes steps with the pools.
        states: Hidden states of the target model.
    """

    def __init__(self, room: DraftRoom, execute: ExecuteLayer, states: KeptStates) -> None:
        self._execute = execute
        self._states = states
        self._drafter = DraftModelDrafter(room, self._compute)
        self._firsts: dict[int, int] = {}  # position of the first token that the layer has read
        self._lengths: dict[int, int] = {}  # tokens of the asked requests, from the first one on
        self.known: Mapping[int, tuple[int, ...]] = {}  # first drafts, in place of the layer's own

    def propose(self, asks: Sequence[DraftAsk]) -> Mapping[int, tuple[int, ...]]:
        """Propose drafts; see `Drafter`. A request without the hidden state before its last token has none."""
        asked = [found for ask in asks if (found := self._from_first(ask)) is not None]
        self._lengths = {ask.request_id: len(ask.tokens) for ask in asked}
        return self._drafter.propose(asked)

    def accepted(self, request_id: int, drafted: int, accepted: int) -> None:
        """Ignore the result: accepted tokens are read at the next proposal."""

    def forget(self, request_id: int) -> None:
        """Free what is kept of a request."""
        self._firsts.pop(request_id, None)
        self._drafter.forget(request_id)
        self._states.forget(request_id)

    def reset(self) -> None:
        """Forget all requests."""
        self._firsts.clear()
        self._drafter.reset()
        self._states.reset()

    def check(self) -> None:
        """Assert that the pools' bookkeeping is consistent."""
        self._drafter.check()

    def _from_first(self, ask: DraftAsk) -> DraftAsk | None:
        """Return the request from the first token that the layer has read, or reads first now."""
        last, kept = len(ask.tokens) - 1, self._states.kept(ask.request_id)
        if last not in range(kept.start + 1, kept.stop + 1):
            return None
        first = self._firsts.get(ask.request_id)
        if first is None or first + self._drafter.read(ask.request_id) <= kept.start:
            self._drafter.forget(ask.request_id)
            first = self._firsts[ask.request_id] = kept.start + 1
        return DraftAsk(ask.request_id, ask.tokens[first:], ask.limit)

    def _compute(self, step: ScheduledStep) -> Mapping[int, int]:
        inputs = {
            chunk.request_id: ChunkInput(
                position=self._firsts[chunk.request_id] + chunk.start,
                drafts=max(0, chunk.start - self._lengths[chunk.request_id] + 1),
            )
            for chunk in step.chunks
        }
        found = self._execute(step, inputs)
        return {name: self._known(name, inputs[name].drafts, token) for name, token in found.items()}

    def _known(self, request_id: int, draft: int, token: int) -> int:
        known = self.known.get(request_id, ())
        return known[draft] if draft < len(known) else token


class LayeredDrafter:
    """Drafter with a layer of multi-token prediction for each depth.

    The layer of depth d reads a token together with the output of depth d - 1 at the token before it. It reads all
    accepted tokens, then the drafts of the depths before it, and adds one draft.

    Args:
        layers: Drafter of each depth, whose hidden states are the outputs of the one before.
    """

    def __init__(self, layers: Sequence[MultiTokenDrafter]) -> None:
        self.layers = layers

    def propose(self, asks: Sequence[DraftAsk]) -> Mapping[int, tuple[int, ...]]:
        """Propose drafts; see `Drafter`."""
        drafts: dict[int, tuple[int, ...]] = {ask.request_id: () for ask in asks}
        for depth, layer in enumerate(self.layers, 1):
            going = [ask for ask in asks if ask.limit >= depth == len(drafts[ask.request_id]) + 1]
            layer.known = drafts
            found = layer.propose([replace(ask, limit=depth) for ask in going])
            drafts |= {name: own for name, own in found.items() if len(own) == depth}
        return drafts

    def accepted(self, request_id: int, drafted: int, accepted: int) -> None:
        """Ignore the result: accepted tokens are read at the next proposal."""

    def forget(self, request_id: int) -> None:
        """Free what is kept of a request."""
        for layer in self.layers:
            layer.forget(request_id)

    def reset(self) -> None:
        """Forget all requests."""
        for layer in self.layers:
            layer.reset()

    def check(self) -> None:
        """Assert that the pools' bookkeeping is consistent."""
        for layer in self.layers:
            layer.check()
