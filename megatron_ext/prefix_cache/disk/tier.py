"""Disk tier of the prefix cache: which evicted entries go to disk, which come back, and until when they are waited for.

It decides and never waits: the storage works beside it (`TierStorage`), times come from the clocks that are given. With
several ranks each has a tier with its part of the entries, and only the driving rank decides which entries are loaded:
a load is complete when all ranks have read their parts, and an entry that one rank lacks is dropped by all (`agree`).

Whatever leaves memory is written. Entries leave memory in the order of its policy, and the priority at which they
leave is a time, which only grows, so the first entry to leave memory is the first to leave the disk.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_ext.prefix_cache.block_index import BlockIndex
from megatron_ext.prefix_cache.disk.agreement import Agreement
from megatron_ext.prefix_cache.disk.data_file import Buffer
from megatron_ext.prefix_cache.disk.entry import EntryKey, EntryKind
from megatron_ext.prefix_cache.disk.entry_copies import key_of
from megatron_ext.prefix_cache.disk.load_estimates import LoadEstimates
from megatron_ext.prefix_cache.disk.store_use import INCOMPLETE, QUARANTINED, QUEUE_FULL
from megatron_ext.prefix_cache.disk.tier_load import OFF, READ, READING, TierCounts, TierLoad
from megatron_ext.prefix_cache.disk.tier_storage import Content, EvictedEntries, LoadItem, TierStorage
from megatron_ext.prefix_cache.hash_chain import BlockHash
from megatron_ext.prefix_cache.lower_tier import CachedEntry

TICK = 1e-5  # seconds between the times of entries that are evicted together
MAX_LOADS = 8  # at a time
MAX_LOAD_BYTES = 1024**3  # of loads at a time, if there are several
MAX_RUNS = 256  # remembered

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
    """Disk tier of one cache; see `LowerTier` for what the cache calls. For one thread.

    Args:
        storage: Entries on disk.
        sizes: Bytes of entries.
        copy: Returns an entry that is being evicted with a copy of its bytes.
        clock: Present time in seconds, monotonic.
        load_seconds: Seconds after which a load is given up; 0 loads nothing.
        ranks: Ranks that have parts of the entries; None for a single one.
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
        self._load_seconds, self._wall_clock, self._ranks = load_seconds, wall_clock, ranks
        self._block_bytes, self._snapshot_bytes = sum(sizes.block), sum(sizes.snapshot or ())  # to estimate times
        self._held: dict[EntryKey, BlockHash | None] = {}  # with the hashes of the blocks before
        self._runs: dict[tuple[BlockHash, BlockHash], int] = {}  # ends of runs by their ends; until an entry goes
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

    def hold(self, parents: Mapping[EntryKey, BlockHash | None]) -> None:
        """Note entries that were on disk before the tier began, each with the hash of the block before."""
        self._held.update(parents)

    def agree_on_sizes(self) -> None:
        """Estimate times by the rank with the largest parts, since a stage may lack layers; all ranks call it."""
        if self._ranks is not None:
            block, snapshot = self._ranks.least([-self._block_bytes, -self._snapshot_bytes])
            self._block_bytes, self._snapshot_bytes = -block, -snapshot

    def turn_off(self) -> None:
        """Take and load nothing from now on; what all ranks have read may still be placed."""
        self.is_off = True
        for number in [number for number, load in self.loads.items() if load.progress != READ]:
            self.forget(number)
        self._held.clear()
        self._runs.clear()

    def on_evicted(self, entries: Sequence[CachedEntry]) -> None:
        """Have entries written; those on disk count as used now, and those gone in the meantime are written again."""
        if self.is_off:
            return
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
                self.counts.evicted += 1
            else:
                self.drops[QUEUE_FULL] += 1

    def quarantine(self, block_hash: BlockHash, index: BlockIndex, *, states_only: bool) -> None:
        """Drop a wrong entry and all that was computed from it, from the medium too when this returns.

        Entries whose origin is not known go, too.
        """
        self.forget_loads()
        wrong = untrusted(self._held, block_hash, index, states_only=states_only)
        self._drop(wrong)
        self.drops[QUARANTINED] += len(wrong)
        self._storage.remove(wrong)

    def clear(self) -> None:
        """Forget all entries; they are gone from the medium when this returns."""
        self.forget_loads()
        self._held.clear()
        self._runs.clear()
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
            while end and (EntryKind.SNAPSHOT, block_hashes[end - 1]) not in self._held:
                end -= 1
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
        self._runs[ends] = end
        if len(self._runs) > MAX_RUNS:
            del self._runs[next(iter(self._runs))]
        return end

    @property
    def may_begin(self) -> bool:
        """True if another load may begin, were it small."""
        return not self.is_off and bool(self._load_seconds and self._held) and len(self.loads) < MAX_LOADS

    def has_room(self, run: LoadableRun) -> bool:
        """Return whether another load may begin now."""
        size = run.size + sum(load.size for load in self.loads.values())
        return not self.loads or (len(self.loads) < MAX_LOADS and size <= MAX_LOAD_BYTES)

    def pays(self, run: LoadableRun, tokens: int) -> bool:
        """Return whether loading a run is estimated to be quicker than computing so many tokens."""
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
            tokens: Tokens of the request, which those on disk must equal.
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
        self._storage.load(self._numbers, items)
        deadline = self._clock() + self._load_seconds
        self.loads[self._numbers] = TierLoad(run.size, deadline, [item.key for item in items])
        self.counts.loads += 1
        return self._numbers

    def follow(self) -> None:
        """Take note of what the disk has done."""
        for event in self._storage.take():
            if isinstance(event, EvictedEntries):
                self._note_gone(event)
            elif event.number in self.loads:
                load = self.loads[event.number]
                load.loaded = event
                if self._ranks is None:
                    self._note_progress(load, load.own_progress, event.seconds)

    def agree(self, numbers: Sequence[int]) -> None:
        """Agree with other ranks on the progress of these loads; each makes this call with the same numbers."""
        if self._ranks is None or not numbers:
            return
        own = [self._own_progress(number) for number in numbers]
        least = self._ranks.least([*(progress for progress, _ in own), *(-nanoseconds for _, nanoseconds in own)])
        found = least[: len(numbers)]
        for number, progress, nanoseconds in zip(numbers, found, least[len(numbers) :], strict=True):
            load = self.loads.get(number)
            if load is not None and load.progress == READING:
                self._note_progress(load, progress, -nanoseconds / 1e9)
                if 0 <= progress < READING:
                    self._drop_incomplete(load.keys[progress])
        if OFF in found and not self.is_off:
            self.turn_off()

    def _own_progress(self, number: int) -> tuple[int, int]:
        """Return this rank's progress of a load, and nanoseconds of reading."""
        load = self.loads.get(number)
        if self.is_off or load is None:  # the second: what an audit has found is a command to other ranks later
            return OFF if self.is_off else READING, 0
        return load.own_progress, 0 if load.loaded is None else int(load.loaded.seconds * 1e9)

    def _drop_incomplete(self, key: EntryKey) -> None:
        """Drop an entry whose part some rank cannot read: it is of no use on the others, and is written anew by all."""
        self.drops[INCOMPLETE] += key in self._held
        self._drop([key])
        self._storage.drop([key])

    def _note_gone(self, event: EvictedEntries) -> None:
        self.is_off |= event.keys is None
        self._drop(list(self._held) if event.keys is None else event.keys)

    def _drop(self, keys: Collection[EntryKey]) -> None:
        for key in keys:
            self._held.pop(key, None)
        if keys:
            self._runs.clear()

    def _note_progress(self, load: TierLoad, progress: int, seconds: float) -> None:
        load.progress = progress
        if progress == READ:
            self.estimates.reading.note(load.size, seconds)
            self.counts.load_bytes += load.size
            self.counts.load_seconds += seconds

    @property
    def is_due(self) -> bool:
        """True if a load is complete, has failed, or is late."""
        now = self._clock() if self.loads else 0.0
        return any(one.progress != READING or now >= one.deadline for one in self.loads.values())

    def given_up(self) -> dict[int, bool]:
        """Return and forget the loads that have failed, or have not been read in time; the latter with True."""
        found = {}
        for number, load in self.loads.items():
            has_failed = load.progress < READING
            if has_failed or (load.progress == READING and self.is_late(number)):
                found[number] = not has_failed
                self.counts.loads_failed += has_failed
                self.counts.loads_late += not has_failed
        for number in found:
            self.forget(number)
        return found

    def is_late(self, number: int) -> bool:
        """Return whether the deadline of a load is over."""
        return self._clock() >= self.loads[number].deadline

    def complete(self) -> list[int]:
        """Return the loads whose entries can be placed."""
        return [number for number, one in self.loads.items() if one.progress == READ]

    def contents(self, number: int) -> Sequence[Sequence[Buffer]]:
        """Return the buffers of each entry of a complete load, and forget the load: its entries are placed."""
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
    held: Mapping[EntryKey, BlockHash | None], block_hash: BlockHash, index: BlockIndex, *, states_only: bool
) -> list[EntryKey]:
    """Return the entries on disk that a wrong one, or what may have been computed from it, make useless.

    Args:
        held: Entries on disk, with the hashes of the blocks before.
        block_hash: See `LowerTier.quarantine`, also for the next two.
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
