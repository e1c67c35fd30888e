"""Tier of another replica's cache, as the rank that plans for it has it: it decides, and has no bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

from megatron_ext.prefix_cache.cache import PrefixCache
from megatron_ext.prefix_cache.disk.agreement import Agreement
from megatron_ext.prefix_cache.disk.entry import EntryKey
from megatron_ext.prefix_cache.disk.restore import NullStorage, agreed_entries
from megatron_ext.prefix_cache.disk.tier import DiskTier, EntrySizes
from megatron_ext.prefix_cache.disk.tier_storage import Content, Event, Loaded, LoadItem
from megatron_ext.prefix_cache.hash_chain import BlockHash
from megatron_ext.prefix_cache.lower_tier import CachedEntry
from megatron_ext.prefix_cache.observer import PublishedRun


class RemoteStorage:
    """Storage whose bytes are on other ranks: it takes all, and has read its part at once; see `TierStorage`."""

    def __init__(self) -> None:
        self._loaded: list[Event] = []

    def write(self, key: EntryKey, size: int, content: Callable[[], Content]) -> bool:
        """Return True: the ranks that have the bytes write them."""
        return True

    def touch(self, used: Mapping[EntryKey, float]) -> Sequence[EntryKey]:
        """Return nothing: no entry goes; see `TierStorage`, also for the others."""
        return ()

    def remove(self, keys: Sequence[EntryKey]) -> None:
        """Do nothing."""

    def drop(self, keys: Sequence[EntryKey]) -> None:
        """Do nothing."""

    def load(self, number: int, items: Sequence[LoadItem]) -> None:
        """Note that this rank has nothing to read."""
        self._loaded.append(Loaded(number, [()] * len(items), 0.0))

    def cancel(self, number: int) -> None:
        """Do nothing: the load has ended."""

    def take(self) -> list[Event]:
        """Return the loads that were begun."""
        taken, self._loaded = self._loaded, []
        return taken

    def wait(self, seconds: float) -> None:
        """Wait, since nothing tells of other ranks before the next step."""
        threading.Event().wait(seconds)

    def clear(self) -> None:
        """Forget loads."""
        self._loaded.clear()


class ClearedWithCache:
    """Observer of a cache that empties a tier with it, and follows nothing else; see `CacheObserver`."""

    def __init__(self, tier: DiskTier) -> None:
        self._tier = tier

    def on_cleared(self) -> None:
        """Forget all entries."""
        self._tier.clear()

    def on_blocks_stored(self, run: PublishedRun) -> None:
        """Do nothing."""

    def on_blocks_removed(self, block_hashes: Iterable[BlockHash]) -> None:
        """Do nothing."""

    def on_snapshot_stored(self, block_hash: BlockHash) -> None:
        """Do nothing."""

    def on_snapshot_removed(self, block_hash: BlockHash) -> None:
        """Do nothing."""


def tier_of_replica(
    cache: PrefixCache, ranks: Agreement, sizes: EntrySizes, clock: Callable[[], float], load_seconds: float
) -> DiskTier:
    """Return the live tier of a cache whose bytes are on other ranks, which make the same calls on `ranks`.

    Args:
        cache: Cache of the other replica.
        ranks: Ranks of that replica.
        sizes: Bytes of entries, to estimate times.
        clock: See `DiskTier`, also the next one.
        load_seconds: Seconds after which a load is given up.
    """
    tier = DiskTier(RemoteStorage(), sizes, _no_copy, clock, load_seconds, ranks)
    tier.hold(agreed_entries(NullStorage(), ranks))
    tier.agree_on_sizes()
    cache.lower_tier = tier
    cache.add_observer(ClearedWithCache(tier))
    return tier


def _no_copy(entry: CachedEntry, used: float) -> Content:
    raise AssertionError("the bytes are on other ranks")
