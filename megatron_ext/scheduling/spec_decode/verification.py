"""Drafts of decoding requests: how many a step may verify, where their states are kept, and which of them came.

A chunk with drafts begins with the request's last known token. Behind that one and behind each draft a token is drawn
as without speculation; a draft is accepted if it is that token. What stands behind a draft that is not is thrown away.

    position        start      start + 1   start + 2   start + 3
    computed        known      draft 1     draft 2     draft 3
    drawn behind it a          b           c           d
    accepted                   if a is it  if b is     if c is
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from megatron_ext.prefix_cache.cache import PrefixCache
from megatron_ext.prefix_cache.hash_chain import BlockHash, hash_blocks
from megatron_ext.scheduling.chunk import Chunk
from megatron_ext.scheduling.plan import Admission, SchedulerLimits
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.snapshots.snapshot_positions import Snapshot
from megatron_ext.scheduling.spec_decode.draft_slots import DraftSlots

TokensById = Mapping[int, tuple[int, ...]]  # by request id
NO_TOKENS: TokensById = {}


@dataclass(frozen=True)
class DraftBudget:
    """What may be verified in a step.

    Attributes:
        proposals: Drafts by request id.
        free_states: Slots for the states behind them.
    """

    proposals: TokensById
    free_states: int = 0


NO_DRAFT_BUDGET = DraftBudget({})


def max_drafts(request: Request, limits: SchedulerLimits) -> int:
    """The most drafts that the next chunk of a decoding request can have, whatever else is in the step.

    Room for its last token is left. Chunks of `align` end on the next block boundary, as prefills do. The blocks and
    snapshots of a request that ends by a word are those up to that word, which only rank 0 knows, and after the
    commit: it crosses a boundary with one token at a time.
    """
    sequence, size = request.sequence, limits.block_size
    params = request.params
    asked = params.num_speculative_tokens
    most = limits.max_drafts if asked is None else min(asked, limits.max_drafts)
    most = min(most, params.num_tokens_to_generate - request.generated_count - 1)
    if sequence.chain is not None:
        left = size - 1 - sequence.computed_end % size  # known token's block: tokens behind it
        if params.stop_words:
            most = min(most, left - 1)
        elif limits.aligned_chunks:
            most = min(most, left)
    return max(0, most)


@dataclass
class _Room:
    """What a step has left when everybody else has what they need."""

    tokens: int
    blocks: int  # free ones: nothing cached goes for a draft
    states: int | None  # None: there are none to keep


def with_drafts(
    chunks: Sequence[Chunk],
    admissions: Iterable[Admission],
    draft_budget: DraftBudget,
    limits: SchedulerLimits,
    cache: PrefixCache,
) -> list[Chunk]:
    """The chunks of a step, those that decode with as many of their drafts as there is room for, older ones first.

    Args:
        chunks: All that the step computes.
        admissions: Of the step; they take blocks.
        offer: Drafts, of which no more than `max_drafts` are taken, and slots for their states, beside those that the
            chunks' requests have from the step before.
        limits: The engine's.
        cache: Its free blocks.
    """
    if not draft_budget.proposals:
        return list(chunks)
    taken = sum(_missing(chunk.request, chunk.end, limits) for chunk in chunks if chunk.request.block_table)
    taken += sum(admission.new_blocks for admission in admissions)
    held = sum(len(chunk.request.sequence.draft_states) for chunk in chunks)
    room = _Room(
        tokens=limits.max_tokens - sum(chunk.length for chunk in chunks),
        blocks=cache.pool.free_count - taken,
        states=None if cache.states is None else draft_budget.free_states + held,
    )
    return [
        _extended(chunk, draft_budget.proposals[chunk.request.request_id], limits, room)
        if chunk.request.request_id in draft_budget.proposals and chunk.request.is_decoding
        else chunk
        for chunk in chunks
    ]


def _missing(request: Request, end: int, limits: SchedulerLimits) -> int:
    return max(0, limits.blocks_for(end) - len(request.block_table))


def _extended(chunk: Chunk, drafts: tuple[int, ...], limits: SchedulerLimits, room: _Room) -> Chunk:
    """The chunk with as many drafts as fit; `room` is what is left then."""
    count = max(0, min(len(drafts), max_drafts(chunk.request, limits), room.tokens))
    have = max(len(chunk.request.block_table), limits.blocks_for(chunk.end))
    while count:
        end = chunk.end + count
        blocks = max(0, limits.blocks_for(end) - have)
        states = 0 if room.states is None else states_behind(chunk.request, chunk.start, end, limits.block_size)
        if blocks <= max(0, room.blocks) and (room.states is None or states <= room.states):
            room.tokens, room.blocks = room.tokens - count, room.blocks - blocks
            room.states = None if room.states is None else room.states - states
            return dataclasses.replace(chunk, end=end, drafts=drafts[:count])
        count -= 1
    return chunk


def states_behind(request: Request, start: int, end: int, block_size: int) -> int:
    """Slots that a chunk with drafts needs: for the state behind each token but the last, and for its snapshots.

    A state that is to be a snapshot has a slot of its own, since the request may go on from there, too.
    """
    boundaries = 0 if request.sequence.chain is None else end // block_size - start // block_size
    return end - start - 1 + boundaries


def draft_states(chunk: Chunk, slots: DraftSlots, block_size: int) -> tuple[Snapshot, ...]:
    """Where the states behind a chunk's tokens go, in order; see `states_behind`.

    A boundary's has the block hash that the block will have if its drafts come, the others have names of their own.
    """
    states = [Snapshot(position, slots.name(), slots.take()) for position in range(chunk.start + 1, chunk.end)]
    if chunk.request.sequence.chain is not None:
        first = chunk.start // block_size
        for block, block_hash in enumerate(_block_hashes(chunk, first, block_size), start=first + 1):
            states.append(Snapshot(block * block_size, block_hash, slots.take()))
    return tuple(states)


def _block_hashes(chunk: Chunk, first: int, block_size: int) -> list[BlockHash]:
    """Of the blocks from `first` on that the chunk completes, if its drafts come."""
    sequence = chunk.request.sequence
    assert sequence.chain is not None, "it has keys"
    parent = sequence.block_hashes[first - 1] if first else sequence.chain.root
    tokens = sequence.packed[first * block_size :] + array(sequence.packed.typecode, chunk.drafts)
    return hash_blocks(parent, tokens, block_size)


def accepted_tokens(request: Request, drafts: Sequence[int], drawn: Sequence[int]) -> list[int]:
    """The next tokens of a request, at least one: as many as without speculation, until one ends it.

    Args:
        request: Its tokens before.
        drafts: That were verified.
        drawn: The tokens behind the last known one and behind each draft.
    """
    came = [drawn[0]]
    for draft, following in zip(drafts, drawn[1:], strict=True):
        if came[-1] != draft or request.ends_with(came[-1], len(came)):
            break
        came.append(following)
    return came
