"""Announcement of the entries on disk to an observer, with the same calls that report a cache in memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from megatron_ext.prefix_cache.cache import PrefixCache
from megatron_ext.prefix_cache.disk.entry import EntryKey, EntryKind, StoredEntry
from megatron_ext.prefix_cache.hash_chain import BlockHash, packed_tokens
from megatron_ext.prefix_cache.observer import CacheObserver, PublishedRun

OTHER_SALT = "of a salt from before the restart"


class EntryObserver(Protocol):
    """Callbacks on entries of one medium; see `CacheObserver`. They must not block."""

    def on_blocks_stored(self, run: PublishedRun) -> None:
        """Take note of blocks."""

    def on_blocks_removed(self, block_hashes: Iterable[BlockHash]) -> None:
        """Take note that blocks are gone."""

    def on_snapshot_stored(self, block_hash: BlockHash) -> None:
        """Take note of a snapshot."""

    def on_snapshot_removed(self, block_hash: BlockHash) -> None:
        """Take note that a snapshot is gone."""


def told_salt(root: BlockHash, before: BlockHash) -> str | None:
    """Return the salt that observers are told for a sequence whose salt is not known here.

    Args:
        root: Root of the block hashes of sequences without a salt.
        before: Root of the sequence, or for later blocks the hash of the block before, for which it does not matter.
    """
    return None if before == root else f"{OTHER_SALT} {before.hex()}"


def announce(cache: PrefixCache, observer: CacheObserver, root: BlockHash) -> None:
    """Report all entries of a restored cache to a new observer.

    Blocks of sequences with a salt, which is not known here, get a salt that no client has.

    Args:
        cache: Cache that keeps token ids.
        observer: The observer, which takes the cache to be empty.
        root: Root of the block hashes of sequences without a salt.
    """
    assert cache.cached_token_ids is not None, "entries have their tokens"
    for block_hash, is_snapshot in cache.by_worth():
        if is_snapshot:
            observer.on_snapshot_stored(block_hash)
            continue
        before, tokens = cache.cached_token_ids.find(block_hash)
        parent = None if cache.depth_of(block_hash) == 1 else before
        salt = told_salt(root, before)
        size = len(tokens)
        observer.on_blocks_stored(PublishedRun([block_hash], parent, tokens, size, size, salt))


class DiskAnnouncer:
    """Observer of a store that tells another one of the entries of the store's identity.

    Args:
        observer: Observer that is told.
        root: Root of the block hashes of sequences without a salt.
    """

    def __init__(self, observer: EntryObserver, root: BlockHash) -> None:
        self._observer, self._root = observer, root

    def on_stored(self, stored: StoredEntry) -> None:
        """Tell of an entry."""
        entry, block_hash = stored.entry, stored.entry.key.block_hash
        if entry.key.kind is EntryKind.SNAPSHOT:
            self._observer.on_snapshot_stored(block_hash)
            return
        tokens, size = packed_tokens(entry.tokens), len(entry.tokens)
        parent = None if entry.depth == 1 else entry.parent
        salt = told_salt(self._root, entry.parent)
        self._observer.on_blocks_stored(PublishedRun([block_hash], parent, tokens, size, size, salt))

    def on_removed(self, keys: Iterable[EntryKey]) -> None:
        """Tell that entries are gone."""
        for key in keys:
            if key.kind is EntryKind.SNAPSHOT:
                self._observer.on_snapshot_removed(key.block_hash)
            else:
                self._observer.on_blocks_removed([key.block_hash])
