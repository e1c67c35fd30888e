"""Disk tier of the prefix cache: which evicted entries go to disk, which come back, and until when they are waited for.

It decides and never waits: the storage works beside it (`TierStorage`), times come from the clocks that are given. With
several ranks each has a tier with its part of the entries, and only the driving rank decides about loads: each rank
reports once for each load, when it has read its part or the load is given up, in the order in which loads began. A load
is complete when all have read it, and an entry that one rank cannot read is dropped by all (`give_up`).

Whatever leaves memory is written. Entries leave memory in the order of its policy, and the priority at which they
leave is a time, which only grows, so the first entry to leave memory is the first to leave the disk.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from megatron_ext.prefix_cache.block_index import BlockIndex
from megatron_ext.prefix_cache.cache import CachedEntry
from megatron_ext.prefix_cache.disk.entry import Buffer, EntryKey, EntryKind
from megatron_ext.prefix_cache.disk.restore import Agreement
from megatron_ext.prefix_cache.disk.store_use import INCOMPLETE, QUARANTINED, QUEUE_FULL
from megatron_ext.prefix_cache.disk.tier_storage import (
    OFF,
    READ,
    READING,
    Content,
    LoadEstimates,
    LoadItem,
    TierCounts,
    TierLoad,
    TierStorage,
)
from megatron_ext.prefix_cache.hash_chain import BlockHash

logger = logging.getLogger(__name__)

TICK = 1e-5  # seconds between the times of entries that are evicted together
MAX_LOADS = 8  # at a time
MAX_LOAD_BYTES = 1024**3  # of loads at a time, if there are several
MAX_RUNS = 256  # remembered

K = TypeVar("K")
CopyEntry = Callable[[CachedEntry, float], Content]


class EntrySizes(NamedTuple):
    """Bytes of each buffer of an entry; none where a rank has no layer of that kind.

    Attributes:
        block: Buffers of a block.
        snapshot: Buffers of a snapshot; None if the model has no recurrent layers.
    """

    block: tuple[int, ...]
    snapshot: tuple[int, ...] | None

    def of(self, key: EntryKey) -> tuple[int, ...]:
        """Return the sizes of an entry of this kind."""
        return (self.snapshot or ()) if key.kind is EntryKind.SNAPSHOT else self.block


@dataclass(frozen=True)
class LoadableRun:
    """Entries on disk that let a request resume further.

    Attributes:
        end: Resume point in blocks.
        first: Blocks from the start that are in memory.
        has_snapshot: Whether the snapshot at `end` is to be read.
        size: Bytes to read, on the rank with the largest part.
    """

    end: int
    first: int
    has_snapshot: bool
    size: int


class DiskTier:
    """Disk tier of one cache, called in the thread that changes the cache.

    Args:
        storage: Entries on disk.
        sizes: Bytes of entries.
        copy: Returns an entry that is being evicted with a copy of its bytes.
        clock: Present time in seconds, monotonic.
        load_seconds: Seconds after which a load is given up; 0 loads nothing.
        ranks: Ranks that have parts of the entries; a single one by default.
        wall_clock: Present time, seconds since the epoch, for entries that another process finds.

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
        ranks: Agreement | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._storage, self._sizes, self._copy, self._clock = storage, sizes, copy, clock
        self._load_seconds, self._wall_clock = load_seconds, wall_clock
        self._ranks = ranks or Agreement()
        self._block_bytes, self._snapshot_bytes = sum(sizes.block), sum(sizes.snapshot or ())  # to estimate times
        self._held: dict[EntryKey, BlockHash | None] = {}  # with the hashes of the blocks before
        # Results of earlier searches, since each step asks again: ends of runs, until an entry goes, and resume points
        # by the block before the end, also until a snapshot comes.
        self._runs: dict[tuple[BlockHash, BlockHash], int] = {}
        self._resumes: dict[BlockHash, int] = {}
        self._last_used = 0.0
        self._numbers = 0
        self._unreported: deque[int] = deque()  # loads, in order
        self.is_off = False
        self.loads: dict[int, TierLoad] = {}
        self.estimates = LoadEstimates()
        self.counts = TierCounts()
        self.drops: Counter[str] = Counter()

    # Entries on disk

    def __contains__(self, key: EntryKey) -> bool:
        """Return whether an entry can be loaded: it is on disk, or on its way there, as far as is known."""
        return key in self._held and not self.is_off

    def __len__(self) -> int:
        return 0 if self.is_off else len(self._held)

    def hold(self, parents: Mapping[EntryKey, BlockHash | None]) -> None:
        """Note entries that were on disk before the tier began, each with the hash of the block before."""
        self._held.update(parents)
        self._resumes.clear()

    def agree_on_sizes(self) -> None:
        """Estimate times by the rank with the largest parts, since a stage may lack layers; all ranks call it."""
        block, snapshot = self._ranks.least([-self._block_bytes, -self._snapshot_bytes])
        self._block_bytes, self._snapshot_bytes = -block, -snapshot

    def turn_off(self) -> None:
        """Take and load nothing from now on; what all ranks have read may still be placed."""
        self.is_off = True
        for number in [number for number, load in self.loads.items() if load.own_progress != READ]:
            self.give_up(number)
        self._report()

    def on_evicted(self, entries: Sequence[CachedEntry]) -> None:
        """Have entries written that are being evicted; those on disk count as used now, those gone are written again.

        A block comes after its children; the places of the entries may be used after that. An error ends the use of the
        tier, since an eviction cannot fail.
        """
        if self.is_off:
            return
        try:
            self._write(entries)
        except Exception:
            logger.exception("prefix cache on disk: evicted entries could not be taken; serving goes on without it")
            self.turn_off()

    def _write(self, entries: Sequence[CachedEntry]) -> None:
        used: dict[EntryKey, float] = {}
        for entry in entries:
            used[key_of(entry)] = self._last_used = max(self._wall_clock(), self._last_used + TICK)
        self._drop(self._storage.touch({key: at for key, at in used.items() if key in self._held}))
        for entry in entries:
            key = key_of(entry)
            if key in self._held:
                continue
            at = used[key]
            if self._storage.write(key, sum(self._sizes.of(key)), lambda one=entry, at=at: self._copy(one, at)):  # type: ignore[misc]
                self._held[key] = entry.parent
                if key.kind is EntryKind.SNAPSHOT:
                    self._resumes.clear()
                self.counts.evicted += 1
            else:
                self.drops[QUEUE_FULL] += 1

    def quarantine(self, block_hash: BlockHash, index: BlockIndex, *, states_only: bool) -> None:
        """Drop a wrong entry and all that was computed from it or may have been, from the medium too when this returns.

        Args:
            block_hash: Hash of the block whose keys and values, or states at the end, are wrong.
            index: Blocks in memory, where these are gone already.
            states_only: Whether the block's keys and values are sound, and only its snapshot is wrong.
        """
        wrong = untrusted(self._held, block_hash, index, states_only=states_only)
        self._drop(wrong)
        self.forget_loads()
        self.drops[QUARANTINED] += len(wrong)
        self._storage.remove(wrong)

    def clear(self) -> None:
        """Forget all entries; they are gone from the medium when this returns."""
        self.forget_loads()
        self._drop(list(self._held))
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
        end = min(self.end_of_blocks(block_hashes, matched), most)
        has_snapshot = self._sizes.snapshot is not None
        if has_snapshot:
            end = self._end_with_snapshot(block_hashes, end)
        if not end or not (has_snapshot or end > matched):
            return None
        return self.run(end, min(matched, end), has_snapshot=has_snapshot)

    def run(self, end: int, first: int, *, has_snapshot: bool) -> LoadableRun:
        """Return the run of a load; see `LoadableRun`."""
        size = (end - first) * self._block_bytes + has_snapshot * self._snapshot_bytes
        return LoadableRun(end, first, has_snapshot, size)

    def end_of_blocks(self, block_hashes: Sequence[BlockHash], start: int) -> int:
        """Return the end, in blocks, of the run of blocks on disk that begins at block `start` of a sequence."""
        if start >= len(block_hashes):
            return start
        ends = block_hashes[start], block_hashes[-1]
        end = self._runs.pop(ends, start)
        while end < len(block_hashes) and (EntryKind.BLOCK, block_hashes[end]) in self._held:
            end += 1
        _remember(self._runs, ends, end)
        return end

    def _end_with_snapshot(self, block_hashes: Sequence[BlockHash], end: int) -> int:
        """Return the last of the first `end` blocks after which a snapshot is on disk, as a number of blocks."""
        found = end and self._resumes.get(block_hashes[end - 1], end)
        while found and (EntryKind.SNAPSHOT, block_hashes[found - 1]) not in self._held:
            found -= 1
        if end:
            _remember(self._resumes, block_hashes[end - 1], found)
        return found

    @property
    def may_begin(self) -> bool:
        """True if another load may begin, were it small."""
        return not self.is_off and bool(self._load_seconds and self._held) and len(self.loads) < MAX_LOADS

    def has_room(self, run: LoadableRun) -> bool:
        """Return whether another load may begin now."""
        size = run.size + sum(load.size for load in self.loads.values())
        return not self.loads or (len(self.loads) < MAX_LOADS and size <= MAX_LOAD_BYTES)

    def pays(self, run: LoadableRun, tokens: int) -> bool:
        """Return whether loading a run is estimated to be quicker than computing `tokens` tokens."""
        pays = self.estimates.pays(
            run.size, sum(one.size for one in self.loads.values() if one.progress == READING), tokens
        )
        self.counts.loads_slower += not pays
        return pays

    def begin(
        self,
        run: LoadableRun,
        block_hashes: Sequence[BlockHash],
        tokens: Sequence[int],
        block_size: int,
        number: int | None = None,
    ) -> int:
        """Begin to load a run; return the number of the load.

        Args:
            run: The run.
            block_hashes: Hashes of the request's blocks.
            tokens: Tokens of the request, which the stored tokens must equal.
            block_size: Tokens of a block.
            number: Number of the load on the rank that drives; a new one if missing.
        """
        self._numbers = self._numbers + 1 if number is None else number
        places = [(EntryKind.BLOCK, place) for place in range(run.first, run.end)]
        if run.has_snapshot:
            places.append((EntryKind.SNAPSHOT, run.end - 1))
        items = []
        for kind, place in places:
            key = EntryKey(kind, block_hashes[place])
            items.append(LoadItem(key, self._sizes.of(key), tokens[place * block_size : (place + 1) * block_size]))
        load = TierLoad(self._numbers, items, run.size, self._clock() + self._load_seconds)
        self._storage.load(load)
        self._unreported.append(self._numbers)
        self.loads[self._numbers] = load
        self.counts.loads += 1
        return self._numbers

    def follow(self) -> None:
        """Note what the disk has done, report it to other ranks, and note what these have reported."""
        gone = self._storage.gone()
        self.is_off |= gone is None
        self._drop(list(self._held) if gone is None else gone)
        self._report()
        for load in self.loads.values():
            found = load.found() if load.found is not None and load.progress == READING else None
            if found is not None:
                load.progress = found[0]
                if load.progress == READ:
                    seconds = -found[1] / 1e9  # of the slowest rank
                    self.estimates.reading.note(load.size, seconds)
                    self.counts.load_bytes += load.size
                    self.counts.load_seconds += seconds

    def _report(self) -> None:
        """Report the loads whose part has ended here, in the order in which they began: ranks report the same ones."""
        while self._unreported:
            load = self.loads.get(self._unreported[0])
            loaded = None if load is None else load.loaded
            if load is not None and loaded is None and not self.is_off:
                break
            self._unreported.popleft()
            progress = OFF if load is None or self.is_off else load.own_progress
            found = self._ranks.report([progress, 0 if loaded is None else -int(loaded.seconds * 1e9)])
            if load is not None:
                load.found = found

    def _drop(self, keys: Collection[EntryKey]) -> None:
        for key in keys:
            self._held.pop(key, None)
        if keys:
            self._runs.clear()
            self._resumes.clear()

    @property
    def is_due(self) -> bool:
        """True if a load is complete, has failed, or is late."""
        return any(one.progress != READING or self.is_late(number) for number, one in self.loads.items())

    def is_late(self, number: int) -> bool:
        """Return whether the deadline of a load is over."""
        return self._clock() >= self.loads[number].deadline

    def failed(self) -> dict[int, int]:
        """Return the loads that some rank could not read, each with its progress; see `give_up`."""
        return {number: one.progress for number, one in self.loads.items() if one.progress < READING}

    def late(self) -> list[int]:
        """Return the loads that were not read by their deadlines."""
        return [number for number, one in self.loads.items() if one.progress == READING and self.is_late(number)]

    def complete(self) -> list[int]:
        """Return the loads whose entries can be placed."""
        return [number for number, one in self.loads.items() if one.progress == READ]

    def contents(self, number: int) -> Sequence[Sequence[Buffer]]:
        """Return the buffers of each entry of a complete load, and forget the load: its entries are placed."""
        loaded = self.loads.pop(number).loaded
        assert loaded is not None, "the load is complete"
        self.counts.loads_placed += 1
        return loaded.contents

    def give_up(self, number: int, progress: int | None = None) -> None:
        """Give up a load.

        Args:
            number: Number of the load.
            progress: Progress of a failed one: an entry that a rank could not read is of no use on the others, and
                is written anew by all; after a failure of a rank's disk nothing more is taken or loaded.
        """
        load = self.loads.pop(number)
        load.is_given_up = True
        self._report()
        if progress == OFF:
            self.turn_off()
        elif progress is not None:
            key = load.items[progress].key
            if key in self._held:
                self.drops[INCOMPLETE] += 1
            self._drop([key])
            self._storage.drop([key])

    def forget_loads(self) -> None:
        """Give up all loads."""
        for number in list(self.loads):
            self.give_up(number)

    def wait(self, seconds: float) -> None:
        """Wait for the end of a load, for a bounded time."""
        self._storage.wait(self.loads.values(), seconds)

    def check(self) -> None:
        """Assert that loads are within their bounds."""
        assert len(self.loads) <= MAX_LOADS, "too many loads"


def key_of(entry: CachedEntry) -> EntryKey:
    """Return the key of a cached entry."""
    return EntryKey(EntryKind.SNAPSHOT if entry.block is None else EntryKind.BLOCK, entry.block_hash)


def _remember(found: dict[K, int], key: K, end: int) -> None:
    """Keep the last result of a bounded number of sequences."""
    found[key] = end
    if len(found) > MAX_RUNS:
        del found[next(iter(found))]


def untrusted(
    held: Mapping[EntryKey, BlockHash | None], block_hash: BlockHash, index: BlockIndex, *, states_only: bool
) -> list[EntryKey]:
    """Return the entries on disk to distrust after a wrong one: the entry, and all that may be computed from it.

    Args:
        held: Entries on disk, with the hashes of the blocks before.
        block_hash: See `DiskTier.quarantine`, also for the next two.
        index: Blocks in memory, which lie between entries on disk.
        states_only: Whether only the snapshot is wrong.
    """
    parents: dict[BlockHash, BlockHash | None] = {key.block_hash: parent for key, parent in held.items()}
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
