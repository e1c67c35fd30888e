"""Warm restart: what the cache holds at the end of a process is written to the store, and put back at the next start.

Between the two the store belongs to a thread: then it is a tier below memory (`go_live`).

The end is bounded in time. What is worth most is written first, each block after its parents, so that whatever was
written can be used. What the store has already is not written again, but ranked anew. At the start, as much is put back
as fits in free memory, and nothing is evicted for it.

What the cache has to forget is forgotten by the store, too: the cache tells it as an observer.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict

from megatron_ext.prefix_cache.block_pool import BlockId
from megatron_ext.prefix_cache.cache import PrefixCache
from megatron_ext.prefix_cache.disk.entry import EntryKey, EntryKind, StoredEntry
from megatron_ext.prefix_cache.disk.entry_copies import EntryMemory, copy_entry
from megatron_ext.prefix_cache.disk.store import DiskStore
from megatron_ext.prefix_cache.disk.store_thread import StoreThread
from megatron_ext.prefix_cache.disk.store_use import LESS_WORTH
from megatron_ext.prefix_cache.disk.tier import DiskTier, EntrySizes, HeldEntry
from megatron_ext.prefix_cache.disk.tier_storage import Content
from megatron_ext.prefix_cache.hash_chain import BlockHash, packed_tokens
from megatron_ext.prefix_cache.lower_tier import CachedEntry
from megatron_ext.prefix_cache.observer import CacheObserver, PublishedRun

logger = logging.getLogger(__name__)

OTHER_SALT = "of a salt from before the restart"
RANK_SECONDS = 1e-5  # by which an entry counts as used before the one that is worth more


class WarmRestart:
    """Store of one cache, between processes. All methods but `stop` are for the engine's thread, between two steps.

    Args:
        store: Open store, which this closes.
        cache: Cache without contents, which keeps token ids.
        memory: Memory of the cache's blocks and snapshots.
        drain_seconds: Seconds that the end of the process may take to write.

    Attributes:
        loaded: Entries that were put back at the start.
        left_out: Entries that were not written at the end, for want of time or room.
        tier: Tier below memory, once it is live.
    """

    def __init__(self, store: DiskStore, cache: PrefixCache, memory: EntryMemory, drain_seconds: float) -> None:
        assert cache.cached_token_ids is not None, "entries have their tokens"
        self._store, self._cache, self._memory = store, cache, memory
        self._tokens = cache.cached_token_ids
        self._drain_seconds = drain_seconds
        self._is_current = True  # the identity is that of the weights
        self._is_stopped = self._is_closed = False
        self._thread: StoreThread | None = None  # owns the store while the engine runs
        self.tier: DiskTier | None = None
        self.loaded = 0
        self.left_out = 0
        cache.add_observer(self)

    # Start

    def load(self) -> None:
        """Put entries of the store back into the cache, those worth most first, as long as memory is free."""
        placed: list[tuple[EntryKey, BlockId | None]] = []
        for stored in self._store.entries():
            block = None
            if stored.entry.key.kind is EntryKind.BLOCK:
                block = self._load_block(stored)
                is_placed = block is not None
            else:
                is_placed = self._load_snapshot(stored)
            if is_placed:
                placed.append((stored.entry.key, block))
        for key, block in reversed(placed):  # those worth most are the most recently used
            if block is None:
                assert self._cache.states is not None, "a snapshot was placed"
                self._cache.states.commit(key.block_hash, is_taken=False)
            else:
                self._cache.release([block])
        self._store.commit()
        self.loaded = len(placed)
        self._say_loaded()

    def _load_block(self, stored: StoredEntry) -> BlockId | None:
        """Place a block in free memory; None without memory, without its parent, or if its bytes are damaged."""
        cache, entry = self._cache, stored.entry
        parent = None if entry.depth == 1 else entry.parent
        has_parent = parent is None or (cache.find(parent) is not None and cache.depth_of(parent) == entry.depth - 1)
        buffers = self._memory.block_buffers()
        if not cache.pool.free_count or not has_parent or not self._store.read(entry.key, buffers):
            return None
        (block,) = cache.allocate(1)
        self._memory.write_block(block, buffers)
        cache.publish([entry.key.block_hash], [block], parent)
        size = len(entry.tokens)
        self._tokens.keep_run([entry.key.block_hash], entry.parent, packed_tokens(entry.tokens), size, size)
        return block

    def _load_snapshot(self, stored: StoredEntry) -> bool:
        """Place a snapshot in a free slot, not visible yet; return whether that was possible."""
        states, key = self._cache.states, stored.entry.key
        if states is None or not states.free_count or self._cache.find(key.block_hash) is None:
            return False
        buffers = self._memory.snapshot_buffers()
        if not self._store.read(key, buffers):
            return False
        slot = states.reserve(key.block_hash)
        assert slot is not None, "a slot is free"
        self._memory.write_snapshot(slot, key.block_hash, buffers)
        return True

    def _say_loaded(self) -> None:
        use = self._store.use
        if use.other_entries and not len(self._store):
            logger.warning(
                "prefix cache on disk: its %d entries are of another model or other settings: they are not used, and "
                "are evicted first",
                use.other_entries,
            )
        elif use.is_on:
            logger.info("prefix cache on disk: %d of %d entries put back", self.loaded, len(self._store))

    def announce(self, observer: CacheObserver, root: BlockHash) -> None:
        """Tell an observer that is new of all that was put back.

        Blocks of sequences with a salt, which is not known here, get a salt that no client has.

        Args:
            observer: The observer, which takes the cache to be empty.
            root: Root of the block hashes of sequences without a salt.
        """
        for block_hash, is_snapshot in self._cache.by_worth():
            if is_snapshot:
                observer.on_snapshot_stored(block_hash)
                continue
            before, tokens = self._tokens.find(block_hash)
            parent = None if self._cache.depth_of(block_hash) == 1 else before
            salt = None if before == root else f"{OTHER_SALT} {before.hex()}"
            size = len(tokens)
            observer.on_blocks_stored(PublishedRun([block_hash], parent, tokens, size, size, salt))

    # Between start and end

    def go_live(self, load_seconds: float) -> DiskTier:
        """Give the store to a thread: from now on evicted entries are written, and come back; return the tier.

        Args:
            load_seconds: Seconds after which a load is given up.
        """
        memory, held = self._memory, [(one.entry.key, held_entry(one)) for one in self._store.entries()]
        self._thread = StoreThread(self._store)
        has_states = self._cache.states is not None
        sizes = EntrySizes(
            tuple(map(len, memory.block_buffers())), tuple(map(len, memory.snapshot_buffers())) if has_states else ()
        )
        self.tier = DiskTier(self._thread, sizes, self._copy, time.time, load_seconds)
        self.tier.hold(held)
        self._cache.lower_tier = self.tier
        return self.tier

    def _copy(self, entry: CachedEntry, used: float) -> Content:
        return copy_entry(entry, self._tokens, self._memory, used)

    # End

    def close(self) -> None:
        """Write what is worth most within the time that is given, and close the store."""
        deadline = time.monotonic() + self._drain_seconds
        if not self._is_closed and self._take_back(self._drain_seconds) and self._is_current and self._store.use.is_on:
            self._drain(deadline)
        self.abandon()

    def _take_back(self, seconds: float) -> bool:
        """End the thread, which writes what waits for so long; return False if the disk does not answer."""
        thread = self._thread
        if thread is None:
            return True
        self._cache.lower_tier = None
        if self.tier is not None:
            self.tier.turn_off()
        if self._is_stopped or not self._is_current:
            seconds = 0.0
        if not thread.stop(seconds):
            logger.warning("prefix cache on disk: the disk does not answer; what was not written is left out")
            self._is_closed = True
            return False
        self.left_out += thread.left_out
        self._thread = None
        return True

    def stop(self) -> None:
        """End the writing at the next entry; for any thread, and for signal handlers."""
        self._is_stopped = True
        if self._thread is not None:
            self._thread.hurry()

    def _drain(self, deadline: float) -> None:
        now, has_room = time.time(), True
        for position, (block_hash, is_snapshot) in enumerate(self._cache.by_worth()):
            key = EntryKey(EntryKind.SNAPSHOT if is_snapshot else EntryKind.BLOCK, block_hash)
            used = now - position * RANK_SECONDS
            if key in self._store:
                self._store.rate(key, 0.0, used)
            elif has_room and not self._is_stopped and time.monotonic() < deadline:
                refused = self._store.drops[LESS_WORTH]
                self._put(key, used)
                has_room = self._store.drops[LESS_WORTH] == refused
                self.left_out += key not in self._store
            else:
                self.left_out += 1
        self._store.commit()
        logger.info(
            "prefix cache on disk: %d entries kept, %d written, %d left out",
            len(self._store),
            self._store.use.written,
            self.left_out,
        )

    def _put(self, key: EntryKey, used: float) -> None:
        entry = self._cache.entries.find(key.block_hash, is_snapshot=key.kind is EntryKind.SNAPSHOT)
        self._store.put(*self._copy(entry, used))

    def abandon(self) -> None:
        """Close the store without writing."""
        if not self._is_closed and self._take_back(0.0):
            self._is_closed = True
            self._store.close()

    # What the cache has to forget

    def weights_changed(self) -> None:
        """Keep nothing from now on: the identity is that of other weights. The reset of the cache forgets the rest."""
        if self._is_current:
            self._is_current = False
            if self.tier is not None:
                self.tier.turn_off()
            logger.warning("prefix cache on disk: the weights were changed, so nothing is kept for the next start")

    def on_cleared(self) -> None:
        """Forget all entries on disk; see `CacheObserver`, also for the next four, which change nothing there."""
        if self._is_closed:
            return
        if self.tier is None or self._thread is None:
            self._store.clear()
        else:
            self.tier.clear()

    def on_blocks_stored(self, run: PublishedRun) -> None:
        """Do nothing: blocks are written when they are evicted, or at the end."""

    def on_blocks_removed(self, block_hashes: Iterable[BlockHash]) -> None:
        """Do nothing: blocks that were evicted stay on disk."""

    def on_snapshot_stored(self, block_hash: BlockHash) -> None:
        """Do nothing: snapshots are written when they are evicted, or at the end."""

    def on_snapshot_removed(self, block_hash: BlockHash) -> None:
        """Do nothing: snapshots that were evicted stay on disk."""

    # Statistics

    def counts(self) -> dict[str, object]:
        """Return the `prefix_cache_disk` object of a run's counts."""
        use = self._store.use if self._thread is None else self._thread.use
        drops = Counter(use.drops)
        live: dict[str, object] = {}
        if self.tier is not None:
            drops += self.tier.drops
            live = asdict(self.tier.counts) | {"load_seconds": round(self.tier.counts.load_seconds, 3)}
        return {
            "is_on": use.is_on,
            "blocks": use.blocks,
            "snapshots": use.snapshots,
            "bytes": use.bytes,
            "limit_bytes": use.limit_bytes,
            "other_entries": use.other_entries,
            "loaded": self.loaded,
            "read": use.read,
            "written": use.written,
            "left_out": self.left_out,
            "drops": dict(sorted(drops.items())),
        } | live


def held_entry(stored: StoredEntry) -> HeldEntry:
    """Return the place of a stored entry in its sequence."""
    return HeldEntry(None if stored.entry.depth == 1 else stored.entry.parent, stored.entry.depth)
