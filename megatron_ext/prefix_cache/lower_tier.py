"""Cached entries as the tier below memory sees them: what they are, and where their bytes lie."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from megatron_ext.prefix_cache.block_index import BlockIndex
from megatron_ext.prefix_cache.block_pool import BlockId
from megatron_ext.prefix_cache.hash_chain import BlockHash
from megatron_ext.prefix_cache.shared_memory import SharedMemory
from megatron_ext.prefix_cache.state_index import SlotId, StateIndex


class CachedEntry(NamedTuple):
    """Cached entry, and where its bytes lie.

    Attributes:
        block_hash: Hash of the block, or of the block at whose end the snapshot was taken.
        parent: Hash of the block before; None for the first one of a sequence.
        depth: Blocks from the start of the sequence, this one included.
        block: Where the bytes of a block lie until pending copies are made; None for a snapshot.
        slot: The same of a snapshot; None for a block.
    """

    block_hash: BlockHash
    parent: BlockHash | None
    depth: int
    block: BlockId | None
    slot: SlotId | None


class CachedEntries:
    """Cached entries of one cache, and where their bytes lie.

    Args:
        index: Index of the blocks.
        states: Index of the snapshots; None without recurrent layers.
        memory: Memory that blocks and snapshots share; None if each has its own.
    """

    def __init__(self, index: BlockIndex, states: StateIndex | None, memory: SharedMemory | None) -> None:
        self.index, self._states, self._memory = index, states, memory

    def of_blocks(self, blocks: Iterable[BlockId]) -> list[CachedEntry]:
        """Return indexed blocks, each followed by its snapshot, if a request has asked for it."""
        found, states = [], self._states
        for block in blocks:
            block_hash = self.index.hash_of(block)
            found.append(self.of_block(block_hash, block))
            slot = None if states is None else states.find(block_hash)
            if states is not None and slot is not None and not states.is_provisional(block_hash):
                found.append(self.of_snapshot(block_hash, slot))
        return found

    def of_block(self, block_hash: BlockHash, block: BlockId) -> CachedEntry:
        """Return an indexed block."""
        place = block if self._memory is None else self._memory.arena.source_of_block(block)
        return CachedEntry(block_hash, self.index.parent_hash(block_hash), self.index.depth(block_hash), place, None)

    def of_snapshot(self, block_hash: BlockHash, slot: SlotId) -> CachedEntry:
        """Return a visible snapshot."""
        place = slot if self._memory is None else self._memory.arena.source_of_snapshot(block_hash, slot)
        return CachedEntry(block_hash, self.index.parent_hash(block_hash), self.index.depth(block_hash), None, place)

    def find(self, block_hash: BlockHash, *, is_snapshot: bool) -> CachedEntry:
        """Return the indexed block of a hash, or its visible snapshot."""
        if is_snapshot:
            slot = None if self._states is None else self._states.find(block_hash)
            assert slot is not None, "the snapshot is visible"
            return self.of_snapshot(block_hash, slot)
        block = self.index.find(block_hash)
        assert block is not None, "the block is cached"
        return self.of_block(block_hash, block)
