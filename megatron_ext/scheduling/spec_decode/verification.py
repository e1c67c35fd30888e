"""Verification of drafts: number of drafts in a step, slots of their states, and acceptance.

A chunk with drafts begins with the request's last known token. After that token and after each draft a target token is
sampled as without speculation; a draft is accepted if it equals that token. Tokens after a rejected draft are dropped.

    position        start      start + 1   start + 2   start + 3
    computed        known      draft 1     draft 2     draft 3
    sampled after   a           b           c           d
    accepted                   if == a     if == b     if == c
"""

from __future__ import annotations

import dataclasses
import itertools
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from megatron_ext.prefix_cache.block_pool import Stack
from megatron_ext.prefix_cache.cache import PrefixCache
from megatron_ext.prefix_cache.hash_chain import BlockHash, hash_blocks
from megatron_ext.prefix_cache.state_index import SlotId
from megatron_ext.scheduling.chunk import Chunk
from megatron_ext.scheduling.plan import Admission, SchedulerLimits
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.snapshots.snapshot_positions import Snapshot

TokensById = Mapping[int, tuple[int, ...]]  # by request id
NO_TOKENS: TokensById = {}
_NAME_BYTES = 8  # of a state after a draft; shorter than a block hash, so that the two cannot be confused


class DraftSlots(Stack[SlotId]):
    """Slots for the states after drafts, until acceptance is known (SP-2).

    They are rows of the snapshot pool after the snapshot index's initial rows; reserved for a step or two. A state that
    becomes a snapshot stays in place: the index takes its slot and gives another one in exchange
    (`StateIndex.exchange`). So the set of rows changes, and their number does not.

    Args:
        first: Index of the first row.
        total: Number of rows.
    """

    def __init__(self, first: int, total: int) -> None:
        super().__init__(map(SlotId, range(first, first + total)))
        self._total = total
        self._names = itertools.count()

    def name(self) -> BlockHash:
        """Return a unique name for a state that is not a snapshot of the index."""
        return BlockHash(next(self._names).to_bytes(_NAME_BYTES, "little"))

    @staticmethod
    def is_name(block_hash: BlockHash) -> bool:
        """Return whether this is such a name rather than a block hash."""
        return len(block_hash) == _NAME_BYTES

    def check(self, owned: list[SlotId], others: Iterable[SlotId]) -> None:
        """Assert that free and `owned` slots are all of these, each once, and that none belongs to the index."""
        here = [*self._free, *owned]
        assert len(set(here)) == len(here) == self._total, (self._free, owned)
        assert not set(here) & set(others), "a slot is lent and the index's"


def max_drafts(request: Request, limits: SchedulerLimits) -> int:
    """Return the maximum number of drafts in the next chunk of a decoding request, whatever else is in the step.

    Room for the last token of the request is left. Chunks of `align` end on the next block boundary, as prefills do.
    The blocks and snapshots of a request that ends by a stop word are those up to that word, which only rank 0 knows,
    and only after the commit: such a request crosses a boundary with one token at a time.
    """
    size = limits.block_size
    params = request.params
    asked = params.num_speculative_tokens
    limit = limits.max_drafts if asked is None else min(asked, limits.max_drafts)
    limit = min(limit, request.max_generated - request.generated_count - 1)
    if request.chain is not None:
        left = size - 1 - request.computed_end % size  # tokens after the known token in its block
        if params.stop_words:
            limit = min(limit, left - 1)
        elif limits.aligned_chunks:
            limit = min(limit, left)
    return max(0, limit)


@dataclass
class _Room:
    """Capacity that a step has left for drafts after everything else."""

    tokens: int
    blocks: int  # free ones: no cached block is evicted for a draft
    states: int | None  # None without recurrent layers


def with_drafts(
    chunks: Sequence[Chunk],
    admissions: Iterable[Admission],
    proposals: TokensById,
    free_states: int,
    limits: SchedulerLimits,
    cache: PrefixCache,
) -> list[Chunk]:
    """Return the step's chunks, with as many drafts on decodes as capacity allows, older requests first.

    Args:
        chunks: All chunks of the step.
        admissions: Admissions of the step, which take blocks.
        proposals: Proposed drafts, of which at most `max_drafts` are used.
        free_states: Free slots for their states, in addition to slots that the requests hold from the step before.
        limits: Limits of the engine.
        cache: Prefix cache, with the free blocks.
    """
    if not proposals:
        return list(chunks)
    taken = sum(limits.missing_blocks(chunk.request, chunk.end) for chunk in chunks if chunk.request.block_table)
    taken += sum(admission.new_blocks for admission in admissions)
    held = sum(len(chunk.request.draft_states) for chunk in chunks)
    room = _Room(
        tokens=limits.max_tokens - sum(chunk.length for chunk in chunks),
        blocks=cache.pool.free_count - taken,
        states=None if cache.states is None else free_states + held,
    )
    return [
        _extended(chunk, proposals[chunk.request.request_id], limits, room)
        if chunk.request.request_id in proposals and chunk.request.is_decoding
        else chunk
        for chunk in chunks
    ]


def _extended(chunk: Chunk, drafts: tuple[int, ...], limits: SchedulerLimits, room: _Room) -> Chunk:
    """Return the chunk with as many drafts as fit, and take their share from `room`."""
    count = max(0, min(len(drafts), max_drafts(chunk.request, limits), room.tokens))
    have = max(len(chunk.request.block_table), limits.blocks_for(chunk.end))
    while count:
        end = chunk.end + count
        blocks = max(0, limits.blocks_for(end) - have)
        states = 0 if room.states is None else states_after(chunk.request, chunk.start, end, limits.block_size)
        if blocks <= max(0, room.blocks) and (room.states is None or states <= room.states):
            room.tokens, room.blocks = room.tokens - count, room.blocks - blocks
            room.states = None if room.states is None else room.states - states
            return dataclasses.replace(chunk, end=end, drafts=drafts[:count])
        count -= 1
    return chunk


def states_after(request: Request, start: int, end: int, block_size: int) -> int:
    """Return the slots for a chunk with drafts: for the state after each token but the last, and for its snapshots.

    A state that is to become a snapshot has an additional slot, since the request may continue from that position.
    """
    boundaries = 0 if request.chain is None else end // block_size - start // block_size
    return end - start - 1 + boundaries


def draft_states(chunk: Chunk, slots: DraftSlots, block_size: int) -> tuple[Snapshot, ...]:
    """Return the slots of the states after a chunk's tokens, in order; see `states_after`.

    A state at a boundary has the hash that the block gets if its drafts are accepted; others have unique names.
    """
    states = [(position, slots.name()) for position in range(chunk.start + 1, chunk.end)]
    if chunk.request.chain is not None:
        first = chunk.start // block_size
        hashes = _block_hashes(chunk, first, block_size)
        states += [(block * block_size, block_hash) for block, block_hash in enumerate(hashes, start=first + 1)]
    taken = slots.take(len(states))
    return tuple([Snapshot(*state, slot) for state, slot in zip(states, taken, strict=True)])


def _block_hashes(chunk: Chunk, first: int, block_size: int) -> list[BlockHash]:
    """Return the hashes of blocks from `first` on that the chunk completes if its drafts are accepted."""
    request = chunk.request
    assert request.chain is not None, "it has keys"
    parent = request.block_hashes[first - 1] if first else request.chain.root
    tokens = request.tokens[first * block_size :] + array(request.tokens.typecode, chunk.drafts)
    return hash_blocks(parent, tokens, block_size)


def accepted_tokens(request: Request, drafts: Sequence[int], drawn: Sequence[int]) -> list[int]:
    """Return the next tokens of a request, at least one: the same as without speculation, until one ends it.

    Args:
        request: Request before these tokens are appended.
        drafts: Drafts that were verified.
        drawn: Target tokens after the last known token and after each draft.
    """
    accepted = [drawn[0]]
    for draft, following in zip(drafts, drawn[1:], strict=True):
        if accepted[-1] != draft or request.ends_with(accepted[-1], len(accepted)):
            break
        accepted.append(following)
    return accepted
