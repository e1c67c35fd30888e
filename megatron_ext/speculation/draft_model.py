"""Draft model: a smaller model reads the tokens that the large one has accepted, and continues them greedily (SP-1).

For each request the drafter keeps K/V and one state per recurrent layer, after exactly the tokens that it has read.
Drafts are decoded on top of a copy of that state. Whether or not they are accepted, the next proposal starts from what
is kept and reads the tokens accepted meanwhile, so nothing has to be rolled back:

    kept at        len(tokens)      len + limit - 1
      |--- catch up ---|------ drafts -----|          running state: restored from the kept one after drafts
                       ^ kept from now on

The drafter computes with messages of its own (`ScheduledStep`), one for catching up and one for each draft but the
first, with all requests together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_ext.prefix_cache.block_pool import BlockId
from megatron_ext.prefix_cache.hash_chain import BlockHash
from megatron_ext.prefix_cache.matching import Restore
from megatron_ext.prefix_cache.state_index import SlotId
from megatron_ext.scheduling.running_slots import RunningSlot, RunningSlots
from megatron_ext.scheduling.snapshots.snapshot_positions import Snapshot
from megatron_ext.scheduling.step import Sampling, ScheduledChunk, ScheduledStep
from megatron_ext.speculation.drafter import DraftAsk

Execute = Callable[[ScheduledStep], Mapping[int, int]]
"""Computes a step and returns request id -> token sampled for its chunk."""

_GREEDY = Sampling(temperature=0.0, top_k=1, top_p=0.0, uniform=None, forbidden=(), top_n=None)


@dataclass(frozen=True)
class DraftRoom:
    """Capacity of the draft model's pools.

    Attributes:
        block_size: Tokens of a block.
        blocks: Number of K/V blocks.
        requests: Number of running states, and of kept ones.
        step_tokens: Maximum number of tokens of a step.
        longest: Maximum number of positions of the model.
        has_states: True if the model has recurrent layers.
    """

    block_size: int
    blocks: int
    requests: int
    step_tokens: int
    longest: int
    has_states: bool


@dataclass
class _Reader:
    """Progress of the model in reading one request.

    Attributes:
        slot: Slot of the running state, and of the kept one.
        blocks: K/V blocks, in order.
        kept: Tokens that have been read; K/V and the kept state are those after them.
        live: Tokens after which the running state is.
        next_token: Prediction after the kept tokens, if it has been computed.
    """

    slot: RunningSlot
    blocks: list[BlockId] = field(default_factory=list)
    kept: int = 0
    live: int = 0
    next_token: int | None = None


@dataclass
class _Guess:
    """Drafts of one request in preparation."""

    ask: DraftAsk
    reader: _Reader
    drafts: list[int]
    max_drafts: int  # maximum number of drafts, given the capacity


class DraftModelDrafter:
    """Drafter that proposes the greedy continuation of a draft model.

    If a computation fails, the drafter forgets the requests at hand, whose pool contents are undefined then.

    Args:
        room: Capacity of the pools.
        execute: Function that computes steps with the pools.
    """

    def __init__(self, room: DraftRoom, execute: Execute) -> None:
        self._room = room
        self._execute = execute
        self._slots = RunningSlots(room.requests)
        self._free = [BlockId(block) for block in reversed(range(room.blocks))]
        self._readers: dict[int, _Reader] = {}  # those requested last at the end

    def propose(self, asks: Sequence[DraftAsk]) -> Mapping[int, tuple[int, ...]]:
        """Propose drafts; see `Drafter`. A long prompt is read over several proposals, and has no drafts until then."""
        try:
            guesses = self._catch_up(asks)
            self._go_on(guesses)
        except BaseException:
            for ask in asks:
                self.forget(ask.request_id)
            raise
        return {guess.ask.request_id: tuple(guess.drafts) for guess in guesses}

    def accepted(self, request_id: int, drafted: int, accepted: int) -> None:
        """Ignore the result: accepted tokens are read at the next proposal."""

    def forget(self, request_id: int) -> None:
        """Free the blocks and slots of a request and forget what was read of it."""
        reader = self._readers.pop(request_id, None)
        if reader is not None:
            self._free += reversed(reader.blocks)
            self._slots.give_back(reader.slot)

    def reset(self) -> None:
        """Forget all requests, since the pools have lost their contents."""
        for request_id in list(self._readers):
            self.forget(request_id)

    def read(self, request_id: int) -> int:
        """Return the number of tokens of a request that have been read."""
        return self._readers[request_id].kept if request_id in self._readers else 0

    def check(self) -> None:
        """Assert that each block and each slot is free or owned by one request."""
        owned = [block for reader in self._readers.values() for block in reader.blocks]
        assert sorted([*self._free, *owned]) == list(range(self._room.blocks)), "blocks"
        self._slots.check([reader.slot for reader in self._readers.values()])

    # Capacity

    def _places(self, asks: Sequence[DraftAsk]) -> list[_Guess]:
        """Return the requests with capacity for what they read and a draft; those with the least to read first."""
        for ask in asks:  # move requested ones to the end, so that others give way first
            reader = self._readers.pop(ask.request_id, None)
            if reader is not None:
                self._readers[ask.request_id] = reader
        placed = []
        keep = {ask.request_id for ask in asks}
        for ask in sorted(asks, key=self._unread):
            max_drafts = min(ask.limit, self._room.longest - len(ask.tokens) + 1)
            if max_drafts > 0 and self._has_blocks(ask, len(ask.tokens) + max_drafts - 1, keep):
                placed.append(_Guess(ask, self._readers[ask.request_id], [], max_drafts))
        return placed

    def _unread(self, ask: DraftAsk) -> int:
        reader = self._readers.get(ask.request_id)
        return len(ask.tokens) - (reader.kept if reader else 0)

    def _has_blocks(self, ask: DraftAsk, tokens: int, keep: set[int]) -> bool:
        """Return whether a slot and blocks for `tokens` tokens were allocated, evicting requests not in `keep`."""
        has_slot = ask.request_id in self._readers
        has = len(self._readers[ask.request_id].blocks) if has_slot else 0
        wanted = -(-tokens // self._room.block_size) - has
        for idle in [one for one in self._readers if one not in keep]:
            if wanted <= len(self._free) and (has_slot or self._slots.free_count):
                break
            self.forget(idle)
        if wanted > len(self._free) or not (has_slot or self._slots.free_count):
            return False
        if not has_slot:
            self._readers[ask.request_id] = _Reader(self._slots.take())
        blocks = self._readers[ask.request_id].blocks
        blocks += [self._free.pop() for _ in range(wanted)]
        return True

    # Computing

    def _catch_up(self, asks: Sequence[DraftAsk]) -> list[_Guess]:
        """Read new tokens; return the requests that are read to their end, with their first draft."""
        budget = self._room.step_tokens
        chunks: list[ScheduledChunk] = []
        placed = self._places(asks)
        for guess in placed:
            start = guess.reader.kept
            end = min(len(guess.ask.tokens), start + budget)
            if end > start:
                chunks.append(self._chunk(guess, guess.ask.tokens[start:end], start, keeps=True))
                budget -= end - start
        tokens = self._compute(chunks)
        at_end = []
        for guess in placed:
            reader = guess.reader
            if reader.kept == len(guess.ask.tokens):
                reader.next_token = tokens.get(guess.ask.request_id, reader.next_token)
                assert reader.next_token is not None, "the target step has read it"
                guess.drafts.append(reader.next_token)
                at_end.append(guess)
        return at_end

    def _go_on(self, guesses: Sequence[_Guess]) -> None:
        """Decode drafts on top of the first ones."""
        while True:
            going = [guess for guess in guesses if len(guess.drafts) < guess.max_drafts]
            if not going:
                return
            chunks = [
                self._chunk(guess, guess.drafts[-1:], len(guess.ask.tokens) + len(guess.drafts) - 1, keeps=False)
                for guess in going
            ]
            tokens = self._compute(chunks)
            for guess in going:
                guess.drafts.append(tokens[guess.ask.request_id])

    def _chunk(self, guess: _Guess, token_ids: Sequence[int], start: int, *, keeps: bool) -> ScheduledChunk:
        """Return one request's chunk of a step; the state after it is kept if `keeps`."""
        reader, request_id, end = guess.reader, guess.ask.request_id, start + len(token_ids)
        restore = None
        if self._room.has_states and start and reader.live != start:
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
            block_ids=tuple(reader.blocks[: -(-end // self._room.block_size)]),
            shared_end=0,
            running_slot=reader.slot,
            restore=restore,
            snapshots=(snapshot,) if keeps and self._room.has_states else (),
            sampling=_GREEDY if end >= len(guess.ask.tokens) else None,
        )

    def _compute(self, chunks: Sequence[ScheduledChunk]) -> Mapping[int, int]:
        """Compute one step of `chunks`, decodes first; do nothing if there are no chunks."""
        if not chunks:
            return {}
        ordered = sorted(chunks, key=lambda chunk: (not chunk.is_decode, chunk.length))  # few layouts to record
        return self._execute(ScheduledStep(tuple(ordered), sum(chunk.is_decode for chunk in chunks)))


def _name(request_id: int, position: int) -> BlockHash:
    """Return the name of a kept state: its request and position."""
    return BlockHash(f"draft {request_id} {position}".encode())
