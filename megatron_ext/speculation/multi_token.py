"""Drafts of layers of multi-token prediction, which read the target model's hidden states (SP-10, SP-14).

The layer reads token p together with the target's hidden state after token p - 1, and so predicts token p + 1: its
results at p depend on tokens up to p. From its last output and its own draft it goes on greedily. It shares nothing
between requests. A request's text begins where hidden states are there: with the last ones of the prompt, at most as
many as are kept, and after a hit with the first computed token.

For each request the drafter keeps K/V and one state per recurrent layer, after exactly the tokens that it has read.
Drafts are decoded on top of a copy of that state. Whether or not they are accepted, the next proposal starts
from this state and reads the tokens accepted meanwhile, so nothing has to be rolled back:

    kept at        len(text)        len + limit - 1
      |--- catch up ---|------ drafts -----|          running state: restored from the kept one after drafts
                       ^ kept from now on

The drafter computes with messages of its own (`ScheduledStep`), one for catching up and one for each draft but the
first, with all requests together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from megatron_ext.prefix_cache.block_pool import BlockId
from megatron_ext.prefix_cache.hash_chain import BlockHash
from megatron_ext.prefix_cache.matching import Restore
from megatron_ext.prefix_cache.state_index import SlotId
from megatron_ext.scheduling.plan import SchedulerLimits
from megatron_ext.scheduling.running_slots import RunningSlot, RunningSlots
from megatron_ext.scheduling.snapshots.snapshot_positions import Snapshot
from megatron_ext.scheduling.step import Sampling, ScheduledChunk, ScheduledStep
from megatron_ext.speculation.drafter import Drafter, DraftRequest

_GREEDY = Sampling(temperature=0.0, top_k=1, top_p=0.0, uniform=None, forbidden=(), top_n=None)


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


@dataclass
class _Text:
    """Tokens of a request for which drafts are proposed, from the first one that the layer reads.

    Attributes:
        request_id: The request.
        first: Position of the first token in the request.
        tokens: Tokens from the first one on.
        limit: Maximum number of drafts.
        drafts: Drafts so far.
    """

    request_id: int
    first: int
    tokens: Sequence[int]
    limit: int
    drafts: list[int] = field(default_factory=list)


@dataclass
class _Reader:
    """Progress of the layer in reading one request; positions count from the first token that it reads.

    Attributes:
        slot: Slot of the running state, and of the kept one.
        first: Position of the first token in the request.
        blocks: K/V blocks, in order.
        kept: Tokens that have been read; K/V and the kept state are those after them.
        live: Tokens after which the running state is.
        next_token: Prediction after the kept tokens, if it has been computed.
    """

    slot: RunningSlot
    first: int
    blocks: list[BlockId] = field(default_factory=list)
    kept: int = 0
    live: int = 0
    next_token: int | None = None


class MultiTokenDrafter(Drafter):
    """Drafter that proposes the greedy continuation of a layer of multi-token prediction.

    If a computation fails, the drafter reads the requests at hand again, whose pool contents are undefined then.

    Args:
        limits: Limits of the engine's scheduler; the layer's pools have as many blocks and states.
        has_states: True if the layer has recurrent parts.
        execute: Function that computes steps with the pools.
        states: Hidden states of the target model.

    Attributes:
        known: First drafts of each request, in place of the layer's own.
    """

    def __init__(self, limits: SchedulerLimits, has_states: bool, execute: ExecuteLayer, states: KeptStates) -> None:
        self._limits = limits
        self._has_states = has_states
        self._execute = execute
        self._states = states
        self._slots = RunningSlots(limits.max_requests)
        self._free = [BlockId(block) for block in reversed(range(limits.total_blocks))]
        self._readers: dict[int, _Reader] = {}  # those requested last at the end
        self.known: Mapping[int, tuple[int, ...]] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> Mapping[int, tuple[int, ...]]:
        """Propose drafts; see `Drafter`. A request without the hidden state before its last token has none.

        A long prompt is read over several proposals, and has no drafts until then.
        """
        texts = [text for request in requests if (text := self._text_of(request)) is not None]
        try:
            read = self._catch_up(self._places(texts))
            self._go_on(read)
        except BaseException:
            for text in texts:
                self._release(text.request_id)
            raise
        return {text.request_id: tuple(text.drafts) for text in read}

    def forget(self, request_id: int) -> None:
        """Free all memory of a request."""
        self._release(request_id)
        self._states.forget(request_id)

    def reset(self) -> None:
        """Forget all requests."""
        for request_id in list(self._readers):
            self._release(request_id)
        self._states.reset()

    def check(self) -> None:
        """Assert that each block and each slot is free or owned by one request."""
        owned = [block for reader in self._readers.values() for block in reader.blocks]
        assert sorted([*self._free, *owned]) == list(range(self._limits.total_blocks)), "blocks"
        self._slots.check([reader.slot for reader in self._readers.values()])

    def _text_of(self, request: DraftRequest) -> _Text | None:
        """Return the request's text from the first token that the layer has read, or reads first now."""
        last, kept = len(request.tokens) - 1, self._states.kept(request.request_id)
        if last not in range(kept.start + 1, kept.stop + 1):
            return None
        reader = self._readers.get(request.request_id)
        if reader is not None and reader.first + reader.kept <= kept.start:
            self._release(request.request_id)
            reader = None
        first = kept.start + 1 if reader is None else reader.first
        return _Text(request.request_id, first, request.tokens[first:], request.limit)

    # Capacity

    def _places(self, texts: Sequence[_Text]) -> list[_Text]:
        """Return the texts whose tokens and drafts fit the pools, the text with the fewest unread tokens first."""
        for text in texts:  # move requested ones to the end, so that others give way first
            reader = self._readers.pop(text.request_id, None)
            if reader is not None:
                self._readers[text.request_id] = reader
        keep = {text.request_id for text in texts}
        return [text for text in sorted(texts, key=self._unread) if self._has_blocks(text, keep)]

    def _unread(self, text: _Text) -> int:
        reader = self._readers.get(text.request_id)
        return len(text.tokens) - (reader.kept if reader else 0)

    def _has_blocks(self, text: _Text, keep: set[int]) -> bool:
        """Return whether a slot and blocks for a text and its drafts are there, evicting requests not in `keep`.

        The last draft is not read.
        """
        reader = self._readers.get(text.request_id)
        wanted = self._limits.blocks_for(len(text.tokens) + text.limit - 1) - (len(reader.blocks) if reader else 0)
        for idle in [one for one in self._readers if one not in keep]:
            if wanted <= len(self._free) and (reader or self._slots.free_count):
                break
            self._release(idle)
        if wanted > len(self._free) or not (reader or self._slots.free_count):
            return False
        if reader is None:
            reader = self._readers[text.request_id] = _Reader(self._slots.take(), text.first)
        reader.blocks += [self._free.pop() for _ in range(wanted)]
        return True

    def _release(self, request_id: int) -> None:
        """Free the blocks and the slot of a request, which is read again from its first hidden state."""
        reader = self._readers.pop(request_id, None)
        if reader is not None:
            self._free += reversed(reader.blocks)
            self._slots.give_back(reader.slot)

    # Computing

    def _catch_up(self, texts: Sequence[_Text]) -> list[_Text]:
        """Read new tokens; return the texts that are read to their end, with their first draft."""
        budget = self._limits.max_tokens
        chunks: list[ScheduledChunk] = []
        inputs: dict[int, ChunkInput] = {}
        for text in texts:
            start = self._readers[text.request_id].kept
            end = min(len(text.tokens), start + budget)
            if end > start:
                chunks.append(self._chunk(text, text.tokens[start:end], start, keeps=True))
                inputs[text.request_id] = ChunkInput(text.first + start, drafts=0)
                budget -= end - start
        tokens = self._compute(chunks, inputs)
        at_end = []
        for text in texts:
            reader = self._readers[text.request_id]
            if reader.kept == len(text.tokens):
                reader.next_token = tokens.get(text.request_id, reader.next_token)
                assert reader.next_token is not None, "the last chunk is sampled from"
                text.drafts.append(reader.next_token)
                at_end.append(text)
        return at_end

    def _go_on(self, texts: Sequence[_Text]) -> None:
        """Decode drafts on top of the first ones."""
        while going := [text for text in texts if len(text.drafts) < text.limit]:
            chunks, inputs = [], {}
            for text in going:
                start, count = len(text.tokens) + len(text.drafts) - 1, len(text.drafts)
                chunks.append(self._chunk(text, text.drafts[-1:], start, keeps=False))
                inputs[text.request_id] = ChunkInput(text.first + start, drafts=count)
            tokens = self._compute(chunks, inputs)
            for text in going:
                text.drafts.append(tokens[text.request_id])

    def _chunk(self, text: _Text, token_ids: Sequence[int], start: int, *, keeps: bool) -> ScheduledChunk:
        """Return one request's chunk of a step; the state after it is kept if `keeps`."""
        request_id, reader, end = text.request_id, self._readers[text.request_id], start + len(token_ids)
        restore = None
        if self._has_states and start and reader.live != start:
            assert reader.kept == start, "a state that was not kept"
            restore = Restore(_name(request_id, start), SlotId(reader.slot))
        snapshot = Snapshot(end, _name(request_id, end), SlotId(reader.slot))
        reader.live = end
        if keeps:
            reader.kept = end
        return ScheduledChunk(
            request_id=request_id,
            token_ids=tuple(token_ids),
            start=start,
            end=end,
            is_decode=start > 0 and end == start + 1,
            block_ids=tuple(reader.blocks[: self._limits.blocks_for(end)]),
            shared_end=0,
            running_slot=reader.slot,
            restore=restore,
            snapshots=(snapshot,) if keeps and self._has_states else (),
            sampling=_GREEDY if end >= len(text.tokens) else None,
        )

    def _compute(self, chunks: Sequence[ScheduledChunk], inputs: Mapping[int, ChunkInput]) -> Mapping[int, int]:
        """Compute one step of `chunks`, decodes first; return the drafts that follow. Without chunks do nothing."""
        if not chunks:
            return {}
        ordered = sorted(chunks, key=lambda chunk: (not chunk.is_decode, chunk.length))  # few layouts to record
        step = ScheduledStep(tuple(ordered), sum(chunk.is_decode for chunk in chunks))
        found = self._execute(step, inputs)
        return {name: self._known(name, inputs[name].drafts, token) for name, token in found.items()}

    def _known(self, request_id: int, draft: int, token: int) -> int:
        known = self.known.get(request_id, ())
        return known[draft] if draft < len(known) else token


def _name(request_id: int, position: int) -> BlockHash:
    """Return the name of a kept state: its request and position."""
    return BlockHash(f"draft {request_id} {position}".encode())


class LayeredDrafter(Drafter):
    """Drafter with a layer of multi-token prediction for each depth.

    The layer of depth d reads a token together with the output of depth d - 1 at the token before it. It reads all
    accepted tokens, then the drafts of the depths before it, and adds one draft.

    Args:
        layers: Drafter of each depth, whose hidden states are the outputs of the one before.
    """

    def __init__(self, layers: Sequence[MultiTokenDrafter]) -> None:
        self.parts = self.layers = layers

    def propose(self, requests: Sequence[DraftRequest]) -> Mapping[int, tuple[int, ...]]:
        """Propose drafts; see `Drafter`."""
        drafts: dict[int, tuple[int, ...]] = {request.request_id: () for request in requests}
        for depth, layer in enumerate(self.layers, 1):
            going = [request for request in requests if request.limit >= depth == len(drafts[request.request_id]) + 1]
            layer.known = drafts
            found = layer.propose([replace(request, limit=depth) for request in going])
            drafts |= {name: own for name, own in found.items() if len(own) == depth}
        return drafts

    def check(self) -> None:
        """Assert that the pools' bookkeeping is consistent."""
        for layer in self.layers:
            layer.check()
