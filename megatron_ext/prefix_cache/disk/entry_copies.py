"""Cached entries as the store takes them: described, and with a copy of their bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from megatron_ext.prefix_cache.block_pool import BlockId
from megatron_ext.prefix_cache.cached_token_ids import CachedTokenIds
from megatron_ext.prefix_cache.disk.data_file import Buffer
from megatron_ext.prefix_cache.disk.entry import EntryKey, EntryKind, NewEntry
from megatron_ext.prefix_cache.disk.tier_storage import Content
from megatron_ext.prefix_cache.hash_chain import BlockHash
from megatron_ext.prefix_cache.lower_tier import CachedEntry
from megatron_ext.prefix_cache.slabs import ArenaChanges
from megatron_ext.prefix_cache.state_index import SlotId


class LoadTarget(Protocol):
    """Memory that loaded entries are written to, as bytes whose order does not depend on how the memory is laid out."""

    def write_block(self, block: BlockId, buffers: Sequence[Buffer]) -> None:
        """Write a block."""

    def write_snapshot(self, slot: SlotId, block_hash: BlockHash, buffers: Sequence[Buffer]) -> None:
        """Write a snapshot to a slot that is undefined, complete in all layers, and name it."""

    def make_changes(self, changes: ArenaChanges) -> None:
        """Make changes that no step's message has told, between two steps."""


class EntryMemory(LoadTarget, Protocol):
    """Memory of cached blocks and snapshots."""

    def block_buffers(self) -> list[bytearray]:
        """Return buffers for the bytes of a block; none if no layer has keys and values."""

    def snapshot_buffers(self) -> list[bytearray]:
        """Return buffers for the bytes of a snapshot."""

    def read_block(self, block: BlockId) -> list[Buffer]:
        """Return a copy of the bytes of a block."""

    def read_snapshot(self, slot: SlotId) -> list[Buffer]:
        """Return a copy of the bytes of a snapshot."""


class NoMemory:
    """Memory of entries that have no bytes here; see `LoadTarget`."""

    def write_block(self, block: BlockId, buffers: Sequence[Buffer]) -> None:
        """Write nothing."""

    def write_snapshot(self, slot: SlotId, block_hash: BlockHash, buffers: Sequence[Buffer]) -> None:
        """Write nothing."""

    def make_changes(self, changes: ArenaChanges) -> None:
        """Change nothing."""


def key_of(entry: CachedEntry) -> EntryKey:
    """Return the key of an entry."""
    return EntryKey(EntryKind.SNAPSHOT if entry.block is None else EntryKind.BLOCK, entry.block_hash)


def copy_entry(entry: CachedEntry, tokens: CachedTokenIds, memory: EntryMemory, used: float) -> Content:
    """Return the description of a cached entry and a copy of its bytes.

    Args:
        entry: The entry.
        tokens: Token ids of cached blocks.
        memory: Memory that holds the entry.
        used: Time of its last use, seconds since the epoch.
    """
    parent, ids = tokens.find(entry.block_hash)
    described = NewEntry(key_of(entry), parent, entry.depth, ids, used=used)
    if entry.block is not None:
        return described, memory.read_block(entry.block)
    assert entry.slot is not None, "an entry is a block or a snapshot"
    return described, memory.read_snapshot(entry.slot)
