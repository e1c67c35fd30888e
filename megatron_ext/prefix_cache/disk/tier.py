"""Disk tier of the prefix cache: which evicted entries go to disk, which come back, and until when they are waited for.

It decides and never waits: the storage works beside it (`TierStorage`), times come from the clock that is given. With
several ranks only the one that drives decides what is loaded; each has its part of the entries.

Whatever leaves memory is written. Entries leave memory in the order of its policy, and the priority at which they
leave only grows (`lru`: a time, `flops`: the age), so the one that left memory first is the first to leave the disk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_ext.prefix_cache.block_index import BlockIndex
from megatron_ext.prefix_cache.disk.data_file import Buffer
from megatron_ext.prefix_cache.disk.entry import EntryKey, EntryKind
from megatron_ext.prefix_cache.disk.entry_copies import key_of
from megatron_ext.prefix_cache.disk.load_estimates import LoadEstimates
from megatron_ext.prefix_cache.disk.store_use import QUARANTINED, QUEUE_FULL
from megatron_ext.prefix_cache.disk.tier_storage import Content, Gone, Loaded, LoadItem, TierStorage
from megatron_ext.prefix_cache.hash_chain import BlockHash
from megatron_ext.prefix_cache.lower_tier import CachedEntry

TICK = 1e-5  # seconds between the times of entries that are evicted together
MAX_LOADS = 8  # at a time
MAX_LOAD_BYTES = 1024**3  # of loads at a time, if there are several

CopyEntry = Callable[[CachedEntry, float], Content]


class EntrySizes(NamedTuple):
    """Bytes of each buffer of an entry."""

    block: tuple[int, ...]
    snapshot: tuple[int, ...]

    def of(self, key: EntryKey) -> tuple[int, ...]:
        """Return those of an entry of this kind."""
        return self.snapshot if key.kind is EntryKind.SNAPSHOT else self.block


class HeldEntry(NamedTuple):
    """Place of an entry on disk in its sequence."""

    parent: BlockHash | None
    depth: int


@dataclass(frozen=True)
class LoadableRun:
    """Entries on disk that let a request resume further.

    Attributes:
        end: Resume point in blocks.
        first: Blocks from the start that are in memory.
        has_snapshot: Whether the snapshot at `end` is to be read.
        size: Bytes to read.
    """

    end: int
    first: int
    has_snapshot: bool
    size: int


@dataclass
class TierLoad:
    """Load that is under way, or complete and not placed yet.

    Attributes:
        size: Bytes to read.
        deadline: Time after which it is given up.
        loaded: End of the load; None while it is under way.
    """

    size: int
    deadline: float
    loaded: Loaded | None = None


@dataclass
class TierCounts:
    """Counts of a disk tier.

    Attributes:
        evicted: Entries given to the disk as they left memory.
        loads: Loads begun.
        loads_placed: Loads that came back to memory.
        loads_failed: Loads that could not be read.
        loads_late: Loads given up at their deadline.
        loads_useless: Loads given up since blocks before them were evicted, or no request waited any more.
        loads_slower: Loads not begun, since computing was estimated to be quicker.
        load_waits: Requests that waited for loads which have ended.
        load_bytes: Bytes of the loads that were read.
        load_seconds: Seconds of reading them.
    """

    evicted: int = 0
    loads: int = 0
    loads_placed: int = 0
    loads_failed: int = 0
    loads_late: int = 0
    loads_useless: int = 0
    loads_slower: int = 0
    load_waits: int = 0
    load_bytes: int = 0
    load_seconds: float = 0.0


class DiskTier:
    """Disk tier of one cache; see `LowerTier` for what the cache calls. For one thread.

    Args:
        storage: Entries on disk.
        sizes: Bytes of entries.
        copy: Returns an entry that is being evicted with a copy of its bytes.
        clock: Present time, seconds since the epoch.
        load_seconds: Seconds after which a load is given up; 0 loads nothing.

    Attributes:
        is_off: True once nothing is taken or loaded any more.
    """

    def __init__(
        self,
        storage: TierStorage,
        sizes: EntrySizes,
        copy: CopyEntry,
        clock: Callable[[], float],
        load_seconds: float,
    ) -> None:
        self._storage, self._sizes, self._copy, self._clock = storage, sizes, copy, clock
        self._load_seconds = load_seconds
        self._held: dict[EntryKey, HeldEntry] = {}
        self._last_used = 0.0
        self._numbers = 0
        self.is_off = False
        self.loads: dict[int, TierLoad] = {}
        self.estimates = LoadEstimates()
        self.counts = TierCounts()
        self.drops: Counter[str] = Counter()

    # What is on disk

    def __contains__(self, key: EntryKey) -> bool:
        """Return whether an entry is on disk, or on its way there, as far as is known."""
        return key in self._held

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, entries: Iterable[tuple[EntryKey, HeldEntry]]) -> None:
        """Note entries that were on disk before the tier began."""
        self._held.update(entries)

    def turn_off(self) -> None:
        """Take and load nothing from now on."""
        self.is_off = True
        self.forget_loads()
        self._held.clear()

    def on_evicted(self, entries: Sequence[CachedEntry]) -> None:
        """Have entries written; those on disk count as used now."""
        if self.is_off:
            return
        held: list[EntryKey] = []
        for entry in entries:
            key = key_of(entry)
            used = self._last_used = max(self._clock(), self._last_used + TICK)
            if key in self._held:
                held.append(key)
            elif self._storage.write(key, sum(self._sizes.of(key)), lambda one=entry, at=used: self._copy(one, at)):  # type: ignore[misc]
                self._held[key] = HeldEntry(entry.parent, entry.depth)
                self.counts.evicted += 1
            else:
                self.drops[QUEUE_FULL] += 1
        if held:
            self._storage.touch(held, self._last_used)

    def quarantine(self, block_hash: BlockHash, index: BlockIndex, *, states_only: bool) -> None:
        """Drop a wrong entry and all that was computed from it, from the medium too when this returns.

        Entries whose origin is not known go, too.
        """
        self.forget_loads()
        wrong = untrusted(self._held, block_hash, index, states_only=states_only)
        for key in wrong:
            del self._held[key]
        self.drops[QUARANTINED] += len(wrong)
        self._storage.remove(wrong)

    def clear(self) -> None:
        """Forget all entries; they are gone from the medium when this returns."""
        self.forget_loads()
        self._held.clear()
        self._storage.clear()

    # Loads

    def find_run(self, block_hashes: Sequence[BlockHash], matched: int, most: int) -> LoadableRun | None:
        """Return the entries that let a request resume as far as possible; None if nothing on disk does.

        Args:
            block_hashes: Hashes of the request's complete blocks.
            matched: Blocks from its start that are in memory.
            most: Blocks from its start that it could skip at most.
        """
        if self.is_off or not self._load_seconds or not self._held:
            return None
        end = min(matched, most)
        while end < most and EntryKey(EntryKind.BLOCK, block_hashes[end]) in self._held:
            end += 1
        if self._sizes.snapshot:
            while end and EntryKey(EntryKind.SNAPSHOT, block_hashes[end - 1]) not in self._held:
                end -= 1
        has_snapshot = bool(self._sizes.snapshot)
        if not end or not (has_snapshot or end > matched):
            return None
        size = max(0, end - matched) * sum(self._sizes.block) + sum(self._sizes.snapshot)
        return LoadableRun(end, min(matched, end), has_snapshot, size)

    def has_room(self, run: LoadableRun) -> bool:
        """Return whether another load may begin now."""
        size = run.size + sum(load.size for load in self.loads.values())
        return not self.loads or (len(self.loads) < MAX_LOADS and size <= MAX_LOAD_BYTES)

    def pays(self, run: LoadableRun, tokens: int) -> bool:
        """Return whether to load a run is quicker than to compute so many tokens, as far as is known."""
        pays = self.estimates.pays(run.size, sum(one.size for one in self.loads.values() if one.loaded is None), tokens)
        self.counts.loads_slower += not pays
        return pays

    def begin(self, run: LoadableRun, block_hashes: Sequence[BlockHash], tokens: Sequence[int], block_size: int) -> int:
        """Begin to load a run; return the number of the load.

        Args:
            run: The run.
            block_hashes: Hashes of the request's blocks.
            tokens: Tokens of the request, which those on disk must equal.
            block_size: Tokens of a block.
        """
        self._numbers += 1
        places = [(EntryKind.BLOCK, place) for place in range(run.first, run.end)]
        if run.has_snapshot:
            places.append((EntryKind.SNAPSHOT, run.end - 1))
        items = []
        for kind, place in places:
            key = EntryKey(kind, block_hashes[place])
            items.append(LoadItem(key, self._sizes.of(key), tokens[place * block_size : (place + 1) * block_size]))
        self._storage.load(self._numbers, items)
        self.loads[self._numbers] = TierLoad(run.size, self._clock() + self._load_seconds)
        self.counts.loads += 1
        return self._numbers

    def follow(self) -> None:
        """Take note of what the disk has done."""
        for event in self._storage.take():
            if isinstance(event, Gone):
                self._note_gone(event)
            elif event.number in self.loads:
                self._note_loaded(self.loads[event.number], event)

    def _note_gone(self, event: Gone) -> None:
        if event.keys is None:
            self._held.clear()
            self.is_off = True
        for key in event.keys or ():
            self._held.pop(key, None)

    def _note_loaded(self, load: TierLoad, event: Loaded) -> None:
        load.loaded = event
        if event.contents is not None:
            self.estimates.reading.note(load.size, event.seconds)
            self.counts.load_bytes += load.size
            self.counts.load_seconds += event.seconds

    @property
    def is_due(self) -> bool:
        """True if a load is complete, has failed, or is late."""
        now = self._clock() if self.loads else 0.0
        return any(one.loaded is not None or now >= one.deadline for one in self.loads.values())

    def given_up(self) -> list[int]:
        """Return and forget the loads that have failed, or whose deadline is over."""
        now, found = self._clock(), []
        for number, load in self.loads.items():
            has_failed = load.loaded is not None and load.loaded.contents is None
            if has_failed or now >= load.deadline:
                found.append(number)
                self.counts.loads_failed += has_failed
                self.counts.loads_late += not has_failed
        for number in found:
            self.forget(number)
        return found

    def complete(self) -> list[int]:
        """Return the loads whose entries can be placed."""
        loads = self.loads.items()
        return [number for number, one in loads if one.loaded is not None and one.loaded.contents is not None]

    def contents(self, number: int) -> Sequence[Sequence[Buffer]]:
        """Return the buffers of a complete load, those of each entry, and forget it: its entries are placed."""
        loaded = self.loads.pop(number).loaded
        assert loaded is not None, "the load is complete"
        assert loaded.contents is not None, "the load is complete"
        self.counts.loads_placed += 1
        return loaded.contents

    def forget(self, number: int) -> None:
        """Give up a load."""
        del self.loads[number]
        self._storage.cancel(number)

    def forget_loads(self) -> None:
        """Give up all loads."""
        for number in list(self.loads):
            self.forget(number)

    def wait(self, seconds: float) -> None:
        """Wait for the end of a load, for a bounded time."""
        self._storage.wait(seconds)

    def check(self) -> None:
        """Assert that loads are within their bounds, and complete ones are not empty."""
        assert len(self.loads) <= MAX_LOADS, "too many loads"
        assert not (self.is_off and self._held), "a tier that is off holds entries"


def untrusted(
    held: Mapping[EntryKey, HeldEntry], block_hash: BlockHash, index: BlockIndex, *, states_only: bool
) -> list[EntryKey]:
    """Return the entries on disk that a wrong one, or what may have been computed from it, make useless.

    Args:
        held: Entries on disk.
        block_hash: See `LowerTier.quarantine`, also for the next two.
        index: Blocks in memory, which lie between entries on disk.
        states_only: Whether only the snapshot is wrong.
    """
    parents: dict[BlockHash, BlockHash | None] = {key.block_hash: one.parent for key, one in held.items()}
    parents |= {one: index.parent_hash(one) for one in index.block_hashes()}
    sound: dict[BlockHash | None, bool] = {None: True, block_hash: False}
    for one in list(parents):
        chain: list[BlockHash] = []
        at: BlockHash | None = one
        while at not in sound and at in parents:
            assert at is not None, "the start of a sequence is sound"
            chain.append(at)
            at = parents[at]
        sound |= dict.fromkeys(chain, sound.get(at, False))
    block = EntryKey(EntryKind.BLOCK, block_hash)
    return [key for key in held if not sound[key.block_hash] and not (states_only and key == block)]
