"""Announcement of the entries on disk to an observer, with the same calls that report a cache in memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megatron_ext.prefix_cache.cache import PrefixCache
from megatron_ext.prefix_cache.disk.entry import EntryKey, EntryKind, NewEntry
from megatron_ext.prefix_cache.hash_chain import BlockHash, packed_tokens
from megatron_ext.prefix_cache.observer import CacheObserver, EntryObserver, PublishedRun

OTHER_SALT = "of a salt from before the restart"


def _told(block_hash: BlockHash, parent: BlockHash, depth: int, tokens: Sequence[int], root: BlockHash) -> PublishedRun:
    """Return the run of one block, with a salt that no client has if its sequence has one, which is not known here.

    `root` is the root of the block hashes of sequences without a salt; the other parameters are as in `NewEntry`.
    """
    size, is_first = len(tokens), depth == 1
    salt = None if parent == root else f"{OTHER_SALT} {parent.hex()}"  # for later blocks it does not matter
    return PublishedRun([block_hash], None if is_first else parent, packed_tokens(tokens), size, size, salt)


def announce(cache: PrefixCache, observer: CacheObserver, root: BlockHash) -> None:
    """Report all entries of a restored cache to a new observer.

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
        observer.on_blocks_stored(_told(block_hash, before, cache.depth_of(block_hash), tokens, root))


class DiskAnnouncer:
    """Observer of a store that tells another one of the entries of the store's identity.

    Args:
        observer: Observer that is told.
        root: Root of the block hashes of sequences without a salt.
    """

    def __init__(self, observer: EntryObserver, root: BlockHash) -> None:
        self._observer, self._root = observer, root

    def on_stored(self, entry: NewEntry) -> None:
        """Tell of an entry."""
        block_hash = entry.key.block_hash
        if entry.key.kind is EntryKind.SNAPSHOT:
            self._observer.on_snapshot_stored(block_hash)
        else:
            told = _told(block_hash, entry.parent, entry.depth, entry.tokens, self._root)
            self._observer.on_blocks_stored(told)

    def on_removed(self, keys: Iterable[EntryKey]) -> None:
        """Tell that entries are gone."""
        for key in keys:
            if key.kind is EntryKind.SNAPSHOT:
                self._observer.on_snapshot_removed(key.block_hash)
            else:
                self._observer.on_blocks_removed([key.block_hash])
