"""Mirror of a cache as published to routers, and the next events to publish."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from megatron_ext.config.kv_events import EVENT_BLOCKS, EVENT_HASHES, EVENT_TOKENS
from megatron_ext.kv_events.changes import Block, Delta
from megatron_ext.kv_events.events import (
    DISK,
    MEMORY,
    AllBlocksCleared,
    AllStatesCleared,
    BlockEvent,
    BlockRemoved,
    BlockStored,
    Hash,
    StateEvent,
    StateRemoved,
    StateStored,
)
from megatron_ext.prefix_cache.hash_chain import BlockHash, packed_tokens
from megatron_ext.prefix_cache.public_hash import event_hash, event_salt


@dataclass(frozen=True)
class CacheEvents:
    """Events to publish, by socket."""

    blocks: list[BlockEvent]
    states: list[StateEvent]


class Mirror:
    """Blocks of a cache, with the subset that is published.

    Without recurrent layers all blocks are published. With recurrent layers a run is published up to its last visible
    snapshot: blocks after it save no computation. Each block has a count of reasons to publish it (a snapshot at its
    end, and published children), so that the cost of a change is proportional to its events.

    Args:
        block_size: Tokens of a block.
        has_states: Whether the model has recurrent layers.
        medium: Medium that holds the blocks. A mirror of the disk publishes all blocks and snapshots; a mirror of
            memory contains a second mirror for the cache's entries on disk.
    """

    def __init__(self, block_size: int, *, has_states: bool, medium: str = MEMORY) -> None:
        self._block_size = block_size
        self._run_blocks = max(1, min(EVENT_BLOCKS, EVENT_TOKENS // block_size))  # of an event
        self._has_states = has_states and medium == MEMORY
        self._medium = medium
        self._disk = Mirror(block_size, has_states=has_states, medium=DISK) if medium == MEMORY else None
        self._blocks: dict[BlockHash, Block] = {}
        self._hashes: dict[BlockHash, Hash] = {}
        self._states: dict[BlockHash, None] = {}
        self._reasons: dict[BlockHash, int] = {}  # of published blocks, with recurrent layers

    def __len__(self) -> int:
        return len(self._blocks)

    def apply(self, delta: Delta) -> CacheEvents:
        """Apply changes and return the events to publish."""
        pending = CacheEvents([], [])
        if delta.cleared:
            pending.blocks.append(AllBlocksCleared())
            pending.states.append(AllStatesCleared())
            for table in (self._blocks, self._hashes, self._states, self._reasons):
                table.clear()
        removed = _slices(self._hashes_of(delta.states_removed))
        pending.states.extend(StateRemoved(hashes, self._medium) for hashes in removed)
        pending.blocks.extend(BlockRemoved(hashes, self._medium) for hashes in _slices(self._remove(delta)))
        self._blocks.update(delta.stored)
        self._hashes.update((block_hash, event_hash(block_hash)) for block_hash in delta.stored)
        self._states.update(delta.states_stored)
        there = self._shown(delta.states_stored) if self._has_states else delta.stored
        pending.blocks.extend(self._runs(there))
        pending.states.extend(self._stored_states(delta.states_stored))
        if self._disk is not None:
            on_disk = CacheEvents([], []) if delta.disk is None else self._disk.apply(delta.disk)
            on_disk = self._disk.contents() if delta.cleared else on_disk  # the event clears them, too
            pending.blocks.extend(on_disk.blocks)
            pending.states.extend(on_disk.states)
        return pending

    def present(self) -> CacheEvents:
        """Return events that describe the whole published contents, for a reader without any state."""
        parts = [self.contents(), *([] if self._disk is None else [self._disk.contents()])]
        blocks = [event for part in parts for event in part.blocks]
        states = [event for part in parts for event in part.states]
        return CacheEvents([AllBlocksCleared(), *blocks], [AllStatesCleared(), *states])

    def contents(self) -> CacheEvents:
        """Return events that store the published contents of this medium."""
        there = (
            [block_hash for block_hash in self._blocks if block_hash in self._reasons]
            if self._has_states
            else self._blocks
        )
        return CacheEvents(list(self._runs(there)), list(self._stored_states(self._states)))

    def _stored_states(self, block_hashes: Iterable[BlockHash]) -> Iterator[StateStored]:
        return (StateStored(hashes, self._medium) for hashes in _slices(self._hashes_of(block_hashes)))

    def _hashes_of(self, block_hashes: Iterable[BlockHash]) -> list[Hash]:
        return [self._hash_of(block_hash) for block_hash in block_hashes]

    def _hash_of(self, block_hash: BlockHash) -> Hash:
        """Return the public hash of a block, which on disk may be missing before its children."""
        known = self._hashes.get(block_hash)
        return event_hash(block_hash) if known is None else known

    def _remove(self, delta: Delta) -> list[Hash]:
        """Remove blocks and snapshots, and return the hashes of published blocks, each after its children."""
        gone = self._hidden(delta.states_removed) if self._has_states else delta.removed
        hashes = self._hashes_of(gone)
        for block_hash in delta.states_removed:
            del self._states[block_hash]
        for block_hash in delta.removed:
            del self._blocks[block_hash], self._hashes[block_hash]
        return hashes

    def _shown(self, snapshots: Iterable[BlockHash]) -> list[BlockHash]:
        """Return the blocks to publish because of these new snapshots, each after its parent."""
        shown: list[BlockHash] = []
        for snapshot in snapshots:
            first, block_hash = len(shown), snapshot
            while self._count(block_hash) == 1:
                shown.append(block_hash)
                parent = self._blocks[block_hash].parent
                if parent is None:
                    break
                block_hash = parent
            shown[first:] = reversed(shown[first:])
        return shown

    def _count(self, block_hash: BlockHash) -> int:
        """Add a reason to publish a block, and return the number of its reasons."""
        reasons = self._reasons.get(block_hash, 0) + 1
        self._reasons[block_hash] = reasons
        return reasons

    def _hidden(self, snapshots: Iterable[BlockHash]) -> list[BlockHash]:
        """Return the blocks without a reason to be published once these snapshots are gone, each before its parent."""
        hidden: list[BlockHash] = []
        for snapshot in snapshots:
            block_hash: BlockHash | None = snapshot
            while block_hash is not None:
                self._reasons[block_hash] -= 1
                if self._reasons[block_hash]:
                    break
                del self._reasons[block_hash]
                hidden.append(block_hash)
                block_hash = self._blocks[block_hash].parent
        return hidden

    def _runs(self, block_hashes: Iterable[BlockHash]) -> Iterator[BlockStored]:
        """Group blocks into one event for each run of consecutive blocks."""
        run: list[BlockHash] = []
        for block_hash in block_hashes:
            if run and (self._blocks[block_hash].parent != run[-1] or len(run) == self._run_blocks):
                yield self._run(run)
                run = []
            run.append(block_hash)
        if run:
            yield self._run(run)

    def _run(self, block_hashes: list[BlockHash]) -> BlockStored:
        blocks = [self._blocks[block_hash] for block_hash in block_hashes]
        tokens = packed_tokens(())
        for block in blocks:
            tokens += block.tokens
        parent, salt = blocks[0].parent, blocks[0].salt
        extra = None if salt is None else [[event_salt(salt)], *[None] * (len(blocks) - 1)]
        before = None if parent is None else self._hash_of(parent)
        return BlockStored(self._hashes_of(block_hashes), before, tokens, self._block_size, extra, self._medium)


def _slices(hashes: list[Hash]) -> Iterator[list[Hash]]:
    """Split hashes into lists that fit one event each."""
    return (hashes[start : start + EVENT_HASHES] for start in range(0, len(hashes), EVENT_HASHES))
