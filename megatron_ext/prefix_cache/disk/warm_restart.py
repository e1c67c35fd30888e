"""Warm restart: cached entries are written to the store when a process ends, and restored at the next start.

From start to end the store belongs to a thread, and is a tier below memory. Several ranks keep parts of each entry, and
an entry exists once all ranks have it: they agree on the entries to restore, and forget the others. At the end they
write in the same order.

The end is bounded in time. The most valuable entries are written first, each block after its parents, so that all
written entries can be used. Entries that the store already has are not written again, but count as used now. At the
start, as many entries are restored as fit in free memory, and nothing is evicted for them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import TimeoutError as NoAnswer
from dataclasses import asdict
from typing import TypeVar

from megatron_ext.prefix_cache.block_pool import BlockId
from megatron_ext.prefix_cache.cache import CachedEntry, PrefixCache
from megatron_ext.prefix_cache.disk.announcing import DiskAnnouncer
from megatron_ext.prefix_cache.disk.entry import Buffer, EntryKey, EntryKind, NewEntry, StoredEntry
from megatron_ext.prefix_cache.disk.restore import (
    Agreement,
    Place,
    agreed_entries,
    parent_of,
    restore_entries,
)
from megatron_ext.prefix_cache.disk.store import DiskStore
from megatron_ext.prefix_cache.disk.store_thread import STOP_SECONDS, StoreThread
from megatron_ext.prefix_cache.disk.store_use import INCOMPLETE, DiskUse
from megatron_ext.prefix_cache.disk.tier import DiskTier, EntrySizes, key_of
from megatron_ext.prefix_cache.disk.tier_storage import Content, TierStorage
from megatron_ext.prefix_cache.hash_chain import BlockHash
from megatron_ext.prefix_cache.observer import EntryObserver
from megatron_ext.prefix_cache.slabs import ArenaChanges
from megatron_ext.prefix_cache.state_index import SlotId

T = TypeVar("T")

logger = logging.getLogger(__name__)
NO_ANSWER = "prefix cache on disk: the disk does not answer; entries that are not written yet are left out"

RANK_SECONDS = 1e-5  # between times of use that entries are given, the most valuable entry the latest


class EntryMemory:
    """Memory of cached blocks and snapshots, as bytes whose order does not depend on how the memory is laid out.

    This base class serves a rank that plans for a cache with its bytes on other ranks.
    """

    def block_buffers(self) -> list[bytearray]:
        """Return buffers for the bytes of a block; none if no layer has keys and values."""
        return []

    def snapshot_buffers(self) -> list[bytearray]:
        """Return buffers for the bytes of a snapshot; none if no layer is recurrent."""
        return []

    def read_block(self, block: BlockId) -> list[Buffer]:
        """Return a copy of the bytes of a block."""
        return []

    def read_snapshot(self, slot: SlotId) -> list[Buffer]:
        """Return a copy of the bytes of a snapshot."""
        return []

    def write_block(self, block: BlockId, buffers: Sequence[Buffer]) -> None:
        """Write a block."""

    def write_snapshot(self, slot: SlotId, block_hash: BlockHash, buffers: Sequence[Buffer]) -> None:
        """Write a snapshot to a slot that is undefined, complete in all layers, and name it."""

    def make_changes(self, changes: ArenaChanges) -> None:
        """Make changes that no step's message has told, between two steps."""


class WarmRestart:
    """Store of one cache, between processes; with several ranks, one rank's part of it.

    All methods but `stop` are for the engine's thread, between two steps. All ranks call `go_live`, `keep` and `close`
    together.

    Args:
        store: Open store, which this closes.
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
        memory: EntryMemory,
        drain_seconds: float,
        load_seconds: float = 0.0,
        ranks: Agreement | None = None,
        others: Sequence[Agreement] = (),
    ) -> None:
        self._thread, self.memory = StoreThread(store), memory
        self._ranks = ranks or Agreement()
        self._others = others
        self._drain_seconds, self._load_seconds = drain_seconds, load_seconds
        self._is_current = True  # the store's identity still matches the weights
        self._is_stopped = self._is_closed = False
        self._write_until = 0.0  # once the writing has begun
        self.tier: DiskTier | None = None
        self._tiers: list[DiskTier] = []  # of all caches
        self.loaded = 0
        self.left_out = 0

    # Start

    def go_live(self, caches: Sequence[PrefixCache]) -> list[tuple[DiskTier, EntryMemory]]:
        """Let evicted entries be written, and come back; the first time entries are put back into free memory.

        Args:
            caches: Empty caches, which keep token ids: of this rank, and on the rank that plans for all, of the
                other replicas.

        Returns:
            Tiers and memories of the caches; none if the weights were changed.
        """
        if not self._is_current:
            return []
        self._cache, *others = caches
        self._tiers.clear()
        is_start, memory = self.tier is None, self.memory
        own = {} if self._is_closed else {one.key: one for one in self._thread.run(DiskStore.entries)}
        sizes = EntrySizes(
            tuple(map(len, memory.block_buffers())),
            None if self._cache.states is None else tuple(map(len, memory.snapshot_buffers())),
        )

        def tier_of(
            cache: PrefixCache, ranks: Agreement, part: Mapping[EntryKey, StoredEntry] | None, storage: TierStorage
        ) -> tuple[DiskTier, int]:
            agreed = agreed_entries(part, ranks)
            fill = self._fill if part is not None else lambda _: ()  # the entries are on other ranks
            placed, damaged = restore_entries(cache, agreed, fill, ranks) if is_start else (0, set())
            tier = DiskTier(storage, sizes, self._copy, time.monotonic, self._load_seconds, ranks)
            tier.hold({one.key: parent_of(one) for one in agreed if one.key not in damaged})
            tier.agree_on_sizes()
            cache.lower_tier = tier
            self._tiers.append(tier)
            return tier, placed

        self.tier, count = tier, _ = tier_of(self._cache, self._ranks, own, self._thread)
        if self._is_closed:
            tier.turn_off()
        # Entries that another rank lacks can never be loaded: they would only take room.
        elif incomplete := [key for key in own if key not in tier]:
            self._thread.run(lambda store: store.forget(incomplete, INCOMPLETE))
        if is_start:
            self.loaded = count
            self._say_loaded()
        remote = [tier_of(*one, None, TierStorage())[0] for one in zip(others, self._others, strict=True)]
        return [(tier, memory), *((tier, EntryMemory()) for tier in remote)]

    def _fill(self, place: Place) -> Sequence[int] | None:
        """Read an entry into memory and return its token ids; None if it is damaged."""
        is_block = place.block is not None
        buffers = self.memory.block_buffers() if is_block else self.memory.snapshot_buffers()
        tokens = self._thread.run(lambda store: store.read(place.entry.key, buffers))
        if tokens is None:
            return None
        if place.block is not None:
            self.memory.write_block(place.block, buffers)
        elif place.slot is not None:
            self.memory.write_snapshot(place.slot, place.entry.key.block_hash, buffers)
        return tokens

    def _copy(self, entry: CachedEntry, used: float) -> Content:
        """Return the description of a cached entry, with this time of last use, and a copy of its bytes."""
        assert self._cache.cached_token_ids is not None, "entries have their tokens"
        parent, tokens = self._cache.cached_token_ids.find(entry.block_hash)
        described = NewEntry(key_of(entry), parent, entry.depth, tokens, used)
        if entry.block is not None:
            return described, self.memory.read_block(entry.block)
        assert entry.slot is not None, "an entry is a block or a snapshot"
        return described, self.memory.read_snapshot(entry.slot)

    def _say_loaded(self) -> None:
        use = self._thread.use
        if not self._ranks.leads or not use.is_on:
            return
        if use.other_entries and not use.entries:
            logger.warning(
                "prefix cache on disk: its %d entries are of another model or other settings: they are not used, and "
                "are evicted first",
                use.other_entries,
            )
        else:
            logger.info("prefix cache on disk: %d of %d entries put back", self.loaded, use.entries)

    def announce_disk(self, observer: EntryObserver, root: BlockHash) -> None:
        """Tell an observer of all entries on disk, now and on every change, with salts as in `announcing`.

        Args:
            observer: The observer.
            root: Root of the block hashes of sequences without a salt.
        """

        def announce(store: DiskStore) -> None:
            announcer = DiskAnnouncer(observer, root)
            store.observers.append(announcer)
            for entry in store.entries():
                if entry.key.kind is EntryKind.SNAPSHOT:  # its hash is enough
                    observer.on_snapshot_stored(entry.key.block_hash)
                elif (described := store.describe(entry)) is not None:
                    announcer.on_stored(described)

        self._thread.run(announce)

    def weights_changed(self) -> None:
        """Keep nothing from now on: the identity belongs to other weights. The reset of the cache forgets the rest."""
        if self._is_current:
            self._is_current = False
            self._end_tiers()
            logger.warning("prefix cache on disk: the weights were changed, so nothing is kept for the next start")

    # End

    def close(self) -> None:
        """Write the most valuable entries within the drain time, and close the store."""
        try:
            self.keep()
        finally:
            self.abandon()

    def keep(self) -> None:
        """Write the most valuable entries within the drain time, and end the tier."""
        if self._is_closed or self.tier is None or not self._is_current:
            return
        self._write_until = time.monotonic() + self._drain_seconds
        self._end_tiers()
        try:
            self._drain()
            self._run(DiskStore.commit)
        except NoAnswer:
            self._leave()
            logger.warning(NO_ANSWER)
            return
        use = self._thread.use
        if self._ranks.leads and use.is_on:
            logger.info(
                "prefix cache on disk: %d entries kept, %d written, %d left out",
                use.entries,
                use.written,
                self.left_out,
            )

    def _end_tiers(self) -> None:
        """Load nothing more; all ranks report the loads that were under way."""
        for tier in self._tiers:
            tier.turn_off()

    def _leave(self) -> None:
        """Leave the store alone from now on."""
        self._is_closed = True
        if self.tier is not None:
            self._cache.lower_tier = None

    def _run(self, job: Callable[[DiskStore], T]) -> T:
        """Do a job with the store, about until the time to write is over."""
        return self._thread.run(job, self._seconds_left + STOP_SECONDS)

    @property
    def _seconds_left(self) -> float:
        return 0.0 if self._is_stopped else max(0.0, self._write_until - time.monotonic())

    def stop(self) -> None:
        """End the writing at the next entry; for any thread, and for signal handlers."""
        self._is_stopped = True
        self._thread.hurry()

    def _drain(self) -> None:
        now = time.time()
        used = {
            EntryKey(EntryKind.SNAPSHOT if is_snapshot else EntryKind.BLOCK, block_hash): now - position * RANK_SECONDS
            for position, (block_hash, is_snapshot) in enumerate(self._cache.by_worth())
        }
        self._thread.touch(used)
        stored = self._run(lambda store: {key for key in used if key in store})
        for key, at in used.items():
            if key in stored:
                continue
            entry = self._cache.entry(key.block_hash, is_snapshot=key.kind is EntryKind.SNAPSHOT)
            seconds = self._seconds_left
            if not seconds or not self._thread.put(self._copy(entry, at), seconds + STOP_SECONDS):
                break
        self.left_out += self._run(lambda store: sum(key not in store for key in used))

    def abandon(self) -> None:
        """Close the store; queued entries are still written, in the time left to write."""
        if self._is_closed:
            return
        self._end_tiers()
        self._leave()
        if self._thread.stop(self._seconds_left):
            self.left_out += self._thread.left_out
        else:
            logger.warning(NO_ANSWER)

    # Statistics

    def use(self) -> DiskUse:
        """Return the counts of the entries on disk."""
        counts, drops = ({}, {}) if self.tier is None else (asdict(self.tier.counts), self.tier.drops.copy())
        return DiskUse(self._thread.use, self.loaded, self.left_out, counts, drops)

    def counts(self) -> dict[str, object]:
        """Return the counts of the entries on disk by name."""
        return self.use().shown()
