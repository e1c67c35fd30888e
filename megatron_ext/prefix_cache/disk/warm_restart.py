"""Warm restart: what the cache holds at the end of a process is written to the store, and put back at the next start.

Between the two the store belongs to a thread: then it is a tier below memory (`go_live`). Several ranks keep parts of
each entry, and an entry is there when all ranks have it: they agree on what is put back, on what comes back from the
tier, and write the same entries at the end.

The end is bounded in time. What is worth most is written first, each block after its parents, so that whatever was
written can be used. What the store has already is not written again, but ranked anew. At the start, as much is put back
as fits in free memory, and nothing is evicted for it.

What the cache has to forget is forgotten by the store, too: the cache tells it as an observer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Container, Iterable, Sequence
from dataclasses import asdict

from megatron_ext.prefix_cache.block_index import BlockIndex
from megatron_ext.prefix_cache.cache import PrefixCache
from megatron_ext.prefix_cache.disk.agreement import Agreement, LostRanksError, SingleRankAgreement
from megatron_ext.prefix_cache.disk.announcing import DiskAnnouncer, EntryObserver
from megatron_ext.prefix_cache.disk.entry import EntryKey, EntryKind, NewEntry
from megatron_ext.prefix_cache.disk.entry_copies import EntryMemory, LoadTarget, NoMemory, copy_entry
from megatron_ext.prefix_cache.disk.remote_part import tier_of_replica
from megatron_ext.prefix_cache.disk.restore import Place, agreed_entries, parent_of, restore_entries
from megatron_ext.prefix_cache.disk.store import DiskStore
from megatron_ext.prefix_cache.disk.store_thread import StoreThread
from megatron_ext.prefix_cache.disk.store_use import INCOMPLETE, QUARANTINED, DiskUse
from megatron_ext.prefix_cache.disk.tier import DiskTier, EntrySizes, untrusted
from megatron_ext.prefix_cache.disk.tier_storage import Content
from megatron_ext.prefix_cache.hash_chain import BlockHash
from megatron_ext.prefix_cache.lower_tier import CachedEntry
from megatron_ext.prefix_cache.observer import PublishedRun

logger = logging.getLogger(__name__)

RANK_SECONDS = 1e-5  # by which an entry counts as used before the one that is worth more
DRAIN_WINDOW = 64  # entries after which ranks agree on going on
PATIENCE = 30.0  # seconds to wait for other ranks after the time to write is over


class WarmRestart:
    """Store of one cache, between processes; with several ranks, the part of it that one of them keeps.

    All methods but `stop` are for the engine's thread, between two steps. Those that ranks do together are `load`,
    `go_live`, `keep` and `close`.

    Args:
        store: Open store, which this closes.
        cache: Cache without contents, which keeps token ids.
        memory: Memory of the cache's blocks and snapshots.
        drain_seconds: Seconds that the end of the process may take to write.
        load_seconds: Seconds after which a load of the tier is given up.
        ranks: Ranks that keep the cache; by default a single one.
        others: Ranks of each other replica, on the rank that plans for all.

    Attributes:
        memory: The memory.
        loaded: Entries that were put back at the start.
        left_out: Entries that were not written at the end, for want of time or room.
        tier: Tier below memory, once it is live.
    """

    def __init__(
        self,
        store: DiskStore,
        cache: PrefixCache,
        memory: EntryMemory,
        drain_seconds: float,
        load_seconds: float = 0.0,
        ranks: Agreement | None = None,
        others: Sequence[Agreement] = (),
    ) -> None:
        self._store, self.memory = store, memory
        self._ranks: Agreement = ranks or SingleRankAgreement()
        self._others = others
        self._drain_seconds, self._load_seconds = drain_seconds, load_seconds
        self._is_current = True  # the identity is that of the weights
        self._is_stopped = self._is_closed = False
        self._thread: StoreThread | None = None  # owns the store while the engine runs
        self.tier: DiskTier | None = None
        self.loaded = 0
        self.left_out = 0
        self.follow(cache)

    def follow(self, cache: PrefixCache) -> None:
        """Keep the contents of this cache from now on, which has none yet."""
        assert cache.cached_token_ids is not None, "entries have their tokens"
        self._cache, self._tokens = cache, cache.cached_token_ids
        cache.add_observer(self)
        cache.lower_tier = self

    # Start

    def load(self) -> None:
        """Put entries of the store back into the cache, those worth most first, as long as memory is free.

        Raises:
            LostRanksError: Another rank has failed; the cache must not be used.
        """
        self.loaded = restore_entries(self._cache, self, self._ranks)
        self._store.commit()
        if self._ranks.leads:
            self._say_loaded()

    def entries(self) -> list[NewEntry]:
        """Return the stored entries; see `StoredPart`, also for the next two."""
        return [stored.entry for stored in self._store.entries()]

    def has(self, key: EntryKey) -> bool:
        """Return whether an entry is stored."""
        return key in self._store

    def fill(self, place: Place) -> bool:
        """Read an entry into memory; False if it is damaged."""
        is_block = place.block is not None
        buffers = self.memory.block_buffers() if is_block else self.memory.snapshot_buffers()
        if not self._store.read(place.entry.key, buffers):
            return False
        if place.block is not None:
            self.memory.write_block(place.block, buffers)
        elif place.slot is not None:
            self.memory.write_snapshot(place.slot, place.entry.key.block_hash, buffers)
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

    def announce_disk(self, observer: EntryObserver, root: BlockHash) -> None:
        """Tell an observer of all that is on disk, now and whenever that changes; salts are those of `announce`.

        Args:
            observer: The observer.
            root: Root of the block hashes of sequences without a salt.
        """
        announcer = DiskAnnouncer(observer, root)

        def announce() -> None:
            self._store.observers.append(announcer)
            for stored in self._store.entries():
                announcer.on_stored(stored)

        if self._thread is None:
            announce()
        else:
            self._thread.run(announce)

    # Between start and end

    def go_live(self, other_caches: Sequence[PrefixCache] = ()) -> list[tuple[DiskTier, LoadTarget]]:
        """Give the store to a thread: from now on evicted entries are written, and come back.

        Args:
            other_caches: Caches of the other replicas, on the rank that plans for all.

        Returns:
            Tiers and memories of the cache, and of each other one; none if the weights were changed.

        Raises:
            LostRanksError: Another rank has failed.
        """
        if not self._is_current:
            return []
        memory, has_states = self.memory, self._cache.states is not None
        agreed = agreed_entries(self, self._ranks)
        self._drop_incomplete(agreed)
        self._thread = StoreThread(self._store)
        sizes = EntrySizes(
            tuple(map(len, memory.block_buffers())), tuple(map(len, memory.snapshot_buffers())) if has_states else None
        )
        ranks = None if isinstance(self._ranks, SingleRankAgreement) else self._ranks
        self.tier = DiskTier(self._thread, sizes, self._copy, time.monotonic, self._load_seconds, ranks)
        self.tier.hold(agreed)
        self.tier.agree_on_sizes()
        others = [
            (tier_of_replica(cache, ranks, sizes, time.monotonic, self._load_seconds), NoMemory())
            for cache, ranks in zip(other_caches, self._others, strict=True)
        ]
        return [(self.tier, memory), *others]

    def _drop_incomplete(self, agreed: Container[EntryKey]) -> None:
        """Drop the entries that another rank lacks."""
        found = [one.entry.key for one in self._store.entries() if one.entry.key not in agreed]
        if found:
            self._store.forget(found)
            self._store.drops[INCOMPLETE] += len(found)

    def on_evicted(self, entries: Sequence[CachedEntry]) -> None:
        """Pass evicted entries on to a live tier; an error ends its use, since an eviction cannot fail."""
        if self.tier is None:
            return
        try:
            self.tier.on_evicted(entries)
        except Exception:
            logger.exception("prefix cache on disk: evicted entries could not be taken; serving goes on without it")
            self.tier.turn_off()

    def quarantine(self, block_hash: BlockHash, index: BlockIndex, *, states_only: bool) -> None:
        """Forget a wrong entry and what was computed from it, on the medium too when this returns; see `LowerTier`."""
        if self._is_closed:
            return
        if self.tier is not None and not self.tier.is_off:
            self.tier.quarantine(block_hash, index, states_only=states_only)
            return

        def forget() -> None:
            held = {one.entry.key: parent_of(one.entry) for one in self._store.entries()}
            wrong = untrusted(held, block_hash, index, states_only=states_only)
            self._store.forget(wrong)
            self._store.drops[QUARANTINED] += len(wrong)

        if self._thread is None:
            forget()
        else:
            self._thread.forget_writes()
            self._thread.run(forget)

    def _copy(self, entry: CachedEntry, used: float) -> Content:
        return copy_entry(entry, self._tokens, self.memory, used)

    # End

    def close(self) -> None:
        """Write what is worth most within the time that is given, and close the store."""
        try:
            self.keep()
        finally:
            self.abandon()

    def keep(self) -> None:
        """Write what is worth most within the time that is given, the same entries on all ranks; no tier is live."""
        deadline = time.monotonic() + self._drain_seconds
        if self._is_closed or not self._take_back(self._drain_seconds) or not self._is_current:
            return
        try:
            self._drain(deadline)
        except LostRanksError as error:
            logger.warning("prefix cache on disk: %s: the writing ends", error)
        self._store.commit()
        if self._ranks.leads and self._store.use.is_on:
            logger.info(
                "prefix cache on disk: %d entries kept, %d written, %d left out",
                len(self._store),
                self._store.use.written,
                self.left_out,
            )

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
        now = time.time()
        order = [
            EntryKey(EntryKind.SNAPSHOT if is_snapshot else EntryKind.BLOCK, block_hash)
            for block_hash, is_snapshot in self._cache.by_worth()
        ]
        end = 0  # of what is written
        for start in range(0, len(order), DRAIN_WINDOW):
            window = order[start : start + DRAIN_WINDOW]
            written, reached = self._write_window(window, now - start * RANK_SECONDS, deadline)
            least = self._ranks.least_written(reached, max(0.0, deadline - time.monotonic()) + PATIENCE)
            for position in written:
                if position >= least:
                    self._store.remove(window[position])
            end += least
            if least < len(window):
                break
        for position, key in enumerate(order[end:], end):
            self._store.touch(key, now - position * RANK_SECONDS)
            self.left_out += key not in self._store

    def _write_window(self, keys: Sequence[EntryKey], used: float, deadline: float) -> tuple[list[int], int]:
        """Write or touch entries in their order, up to the first one for which there is no time or room.

        Returns:
            The positions of those that were written, and that of the first one that is neither written nor stored.
        """
        written: list[int] = []
        for position, key in enumerate(keys):
            time_of_use = used - position * RANK_SECONDS
            if key in self._store:
                self._store.touch(key, time_of_use)
                continue
            if self._is_stopped or time.monotonic() >= deadline:
                return written, position
            self._put(key, time_of_use)
            if key not in self._store:
                return written, position
            written.append(position)
        return written, len(keys)

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

    def use(self) -> DiskUse:
        """Return the counts of the entries on disk."""
        store = self._store.use if self._thread is None else self._thread.use
        if self.tier is None:
            return DiskUse(store, self.loaded, self.left_out)
        return DiskUse(store, self.loaded, self.left_out, asdict(self.tier.counts), dict(self.tier.drops))

    def counts(self) -> dict[str, object]:
        """Return the counts of the entries on disk by name."""
        return self.use().shown()
