"""Disk of a simulation: the tier's own decisions over a storage whose reads and writes take simulated time.

Entries have sizes and no bytes. The order in which the disk works, and the one in which it evicts, are those of the
store: removals at once, then loads, then writes; entries that wait to be written are loaded without the disk.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from megatron_ext.engine.disk_loading import DiskLoading
from megatron_ext.prefix_cache.disk.data_file import Buffer
from megatron_ext.prefix_cache.disk.entry import EntryKey, NewEntry, StoredEntry
from megatron_ext.prefix_cache.disk.entry_copies import NoMemory, key_of
from megatron_ext.prefix_cache.disk.extents import PAGE_BYTES, Extent, pages_of
from megatron_ext.prefix_cache.disk.store import EVICTION_SHARE
from megatron_ext.prefix_cache.disk.store_thread import QUEUE_BYTES
from megatron_ext.prefix_cache.disk.store_use import EVICTED, LESS_WORTH, DiskUse, StoreTally
from megatron_ext.prefix_cache.disk.tier import DiskTier, EntrySizes
from megatron_ext.prefix_cache.disk.tier_storage import Content, Event, Gone, Loaded, LoadItem
from megatron_ext.prefix_cache.disk.victims import VictimOrder
from megatron_ext.prefix_cache.hash_chain import BlockHash
from megatron_ext.prefix_cache.lower_tier import CachedEntry
from megatron_ext.scheduling.scheduler import Scheduler

GIB, GB = 1024**3, 10**9
LOAD_SECONDS = 30.0  # after which a load is given up
_IDENTITY = bytes(32)


@dataclass(frozen=True)
class DiskSettings:
    """Disk of a simulated machine.

    Attributes:
        gib: Budget of entries in GiB.
        gbps: Bandwidth of reads and writes in GB/s.
    """

    gib: float
    gbps: float


@dataclass(frozen=True)
class _Work:
    """Load or write that the disk is at.

    Attributes:
        end: Time at which it is done.
        seconds: Time that it takes.
        load: Number of a load.
        write: Key of the entry that is written.
    """

    end: float
    seconds: float
    load: int | None = None
    write: EntryKey | None = None


class SimulatedStorage:
    """Entries on a simulated disk; see `TierStorage`.

    Args:
        settings: Size and speed of the disk.
        clock: Simulated time, in seconds.
        pass_time: Lets time pass until a moment, or until something else happens before it.
        keeps_bytes: Whether entries have their bytes, for an engine in simulated time.
    """

    def __init__(
        self,
        settings: DiskSettings,
        clock: Callable[[], float],
        pass_time: Callable[[float], None],
        *,
        keeps_bytes: bool = False,
    ) -> None:
        self._clock, self._pass_time, self._keeps_bytes = clock, pass_time, keeps_bytes
        self._rate = settings.gbps * GB
        self._limit_pages = self._free_pages = int(settings.gib * GIB) // PAGE_BYTES
        self._entries: dict[int, StoredEntry] = {}
        self._rows: dict[EntryKey, int] = {}
        self._bytes: dict[EntryKey, Sequence[Buffer]] = {}
        self._victims = VictimOrder(self._entries, _IDENTITY)
        self._next_row = 1
        self._loads: OrderedDict[int, tuple[float, Sequence[LoadItem]]] = OrderedDict()  # time when it was asked for
        self._writes: OrderedDict[EntryKey, tuple[float, int, Content]] = OrderedDict()  # time, size
        self._waiting_bytes = 0
        self._work: _Work | None = None
        self._free_at = 0.0  # time since which the disk has been idle
        self._events: list[Event] = []
        self._gone: list[EntryKey] = []
        self.tally = StoreTally()
        self.drops: Counter[str] = Counter()

    def _advance(self) -> None:
        """Do what the disk has done by now."""
        now = self._clock()
        while True:
            self._work = self._work or self._next_work()
            if self._work is None or self._work.end > now:
                return
            work, self._work = self._work, None
            self._free_at = work.end
            if work.load is not None:
                self._end_load(work.load, work.seconds)
            elif work.write is not None and work.write in self._writes:
                _, size, content = self._writes.pop(work.write)
                self._waiting_bytes -= size
                self._store(work.write, size, content)
                self.tally.write_seconds += work.seconds

    def _next_work(self) -> _Work | None:
        if self._loads:
            number, (asked, items) = next(iter(self._loads.items()))
            seconds = sum(sum(item.sizes) for item in items if item.key in self._rows) / self._rate
            return _Work(max(self._free_at, asked) + seconds, seconds, load=number)
        if self._writes:
            key, (asked, size, _) = next(iter(self._writes.items()))
            return _Work(max(self._free_at, asked) + size / self._rate, size / self._rate, write=key)
        return None

    def _end_load(self, number: int, seconds: float) -> None:
        if number not in self._loads:
            return
        _, items = self._loads.pop(number)
        is_there = all(item.key in self._rows or item.key in self._writes for item in items)
        contents = [self._content(item.key) for item in items] if is_there else None
        self._events.append(Loaded(number, contents, seconds))
        stored = [item for item in items if item.key in self._rows]
        self.tally.read += len(stored)
        self.tally.read_bytes += sum(sum(item.sizes) for item in stored)
        self.tally.read_seconds += seconds

    def _content(self, key: EntryKey) -> Sequence[Buffer]:
        if not self._keeps_bytes:
            return ()
        return self._bytes[key] if key in self._rows else self._writes[key][2][1]

    def _store(self, key: EntryKey, size: int, content: Content) -> None:
        entry, buffers = content
        pages = pages_of(size)
        if key in self._rows:
            self._rate_entry(key, entry.used)
            return
        stored = StoredEntry(self._next_row, _IDENTITY, entry, (Extent(0, pages),), size, 0)
        if not self._make_room(pages, stored):
            self.drops[LESS_WORTH] += 1
            self._gone.append(key)
            return
        self._next_row += 1
        self._entries[stored.row_id], self._rows[key] = stored, stored.row_id
        self._free_pages -= pages
        if self._keeps_bytes:
            self._bytes[key] = buffers
        self._victims.add(stored)
        self.tally.add(stored)
        self.tally.written += 1
        self.tally.written_bytes += size

    def _make_room(self, pages: int, entry: StoredEntry) -> bool:
        missing = pages - self._free_pages
        if missing <= 0:
            return True
        chosen = self._victims.take(missing, max(missing, self._limit_pages // EVICTION_SHARE), entry)
        for known in chosen:
            self._drop(known.entry.key)
            self._gone.append(known.entry.key)
            self.drops[EVICTED] += 1
        return bool(chosen)

    def _drop(self, key: EntryKey) -> None:
        known = self._entries.pop(self._rows.pop(key))
        self._free_pages += pages_of(known.size)
        self._bytes.pop(key, None)
        self.tally.add(known, -1)

    def _rate_entry(self, key: EntryKey, used: float) -> None:
        rated = self._entries[self._rows[key]].rated(0.0, used)
        self._entries[rated.row_id] = rated
        self._victims.add(rated)

    # What the tier calls

    def write(self, key: EntryKey, size: int, content: Callable[[], Content]) -> bool:
        """Queue an entry; False if the queue is full."""
        self._advance()
        if self._waiting_bytes and self._waiting_bytes + size > QUEUE_BYTES:
            return False
        self._forget_write(key)
        self._writes[key] = self._clock(), size, content()
        self._waiting_bytes += size
        return True

    def _forget_write(self, key: EntryKey) -> None:
        found = self._writes.pop(key, None)
        self._waiting_bytes -= 0 if found is None else found[1]

    def touch(self, keys: Sequence[EntryKey], used: float) -> None:
        """Set the time of last use of entries."""
        self._advance()
        for key in keys:
            if key in self._rows:
                self._rate_entry(key, used)

    def remove(self, keys: Sequence[EntryKey]) -> None:
        """Remove entries."""
        self._advance()
        for key in keys:
            self._forget_write(key)
            if key in self._rows:
                self._drop(key)

    def drop(self, keys: Sequence[EntryKey]) -> None:
        """Remove entries."""
        self.remove(keys)

    def load(self, number: int, items: Sequence[LoadItem]) -> None:
        """Queue a load."""
        self._advance()
        self._loads[number] = self._clock(), items

    def cancel(self, number: int) -> None:
        """Give up a load."""
        self._advance()
        self._loads.pop(number, None)
        self._events = [one for one in self._events if not isinstance(one, Loaded) or one.number != number]

    def take(self) -> list[Event]:
        """Return and forget what has happened."""
        self._advance()
        gone: list[Event] = [Gone(self._gone)] if self._gone else []
        taken, self._events, self._gone = gone + self._events, [], []
        return taken

    def wait(self, seconds: float) -> None:
        """Let time pass until the disk has done something, however long that takes."""
        self._advance()
        if not self._events and self._work is not None:
            self._pass_time(self._work.end)

    def clear(self) -> None:
        """Forget all entries, writes and loads."""
        for key in list(self._rows):
            self._drop(key)
        self._loads.clear()
        self._writes.clear()
        self._waiting_bytes, self._work = 0, None
        self._events.clear()
        self._gone.clear()


class SimulatedDisk:
    """Disk tier of a replay.

    Args:
        settings: Size and speed of the disk.
        scheduler: Scheduler without requests.
        clock: Simulated time, in seconds.
        pass_time: See `SimulatedStorage`.

    Attributes:
        loading: Loads of the scheduler's requests.
    """

    def __init__(
        self,
        settings: DiskSettings,
        scheduler: Scheduler,
        clock: Callable[[], float],
        pass_time: Callable[[float], None],
    ) -> None:
        costs, cache = scheduler.limits.costs, scheduler.cache
        self._storage = SimulatedStorage(settings, clock, pass_time)
        self._limit_bytes = int(settings.gib * GIB) // PAGE_BYTES * PAGE_BYTES
        sizes = EntrySizes((costs.block_bytes,), None if cache.states is None else (costs.state_bytes,))
        self._tier = cache.lower_tier = DiskTier(
            self._storage, sizes, _described, clock, LOAD_SECONDS, wall_clock=clock
        )
        self.loading = DiskLoading(scheduler, self._tier, NoMemory())

    def use(self) -> DiskUse:
        """Return the counts of the entries on disk."""
        store = self._storage
        use = store.tally.use(other_entries=0, limit_bytes=self._limit_bytes, drops=dict(store.drops), is_on=True)
        return DiskUse(use, 0, 0, asdict(self._tier.counts), dict(self._tier.drops))


def _described(entry: CachedEntry, used: float) -> Content:
    """Return the description of a cached entry, without tokens and bytes."""
    parent = entry.parent or BlockHash(_IDENTITY)
    return NewEntry(key_of(entry), parent, entry.depth, (), used=used), ()
