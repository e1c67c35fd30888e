"""Recording of what a store writes and syncs, and the states that a loss of power at any point may leave.

A write that was not synced may be on the medium or not, in any order and sector by sector. Of a transaction that has
not returned, any sectors of SQLite's log may be there; it syncs the log before it returns, and in a checkpoint the log
before the index, and the index before it empties the log.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_ext.prefix_cache.disk.data_file import PAGE_BYTES, DataFile
from megatron_ext.prefix_cache.disk.entry import EntryKey, StoredEntry
from megatron_ext.prefix_cache.disk.index import WAL_SUFFIX, DiskIndex
from megatron_ext.prefix_cache.disk.slot import DATA, INDEX, take_slot
from megatron_ext.prefix_cache.disk.store import DiskStore
from tests.unit_tests.prefix_cache.disk.lives import IDENTITY, LIMIT, files_of

SECTOR = 512
WAL = INDEX + WAL_SUFFIX
Images = dict[str, bytes]


@dataclass(frozen=True)
class Write:
    position: int
    data: bytes


@dataclass(frozen=True)
class Grown:
    size: int


@dataclass(frozen=True)
class Synced:
    pass


class Emptied:
    pass


@dataclass(frozen=True)
class Transaction:
    """Change of the index's files, and the entries that are in it from then on."""

    before: Images
    after: Images
    is_checkpoint: bool
    keys: frozenset[EntryKey]


Event = Write | Grown | Emptied | Synced | Transaction


class RecordedData(DataFile):
    def __init__(self, handle: int, limit: int, log: list[Event]) -> None:
        super().__init__(handle, limit)
        self._log = log

    def _put(self, position: int, piece: memoryview) -> None:
        self._log.append(Write(position, bytes(piece)))
        super()._put(position, piece)

    def _grow(self, end: int) -> None:
        before = self.size
        super()._grow(end)
        if self.size > before:
            self._log.append(Grown(self.size))

    def clear(self) -> None:
        super().clear()
        self._log.append(Emptied())

    def sync(self) -> None:
        super().sync()
        self._log.append(Synced())


class RecordedIndex(DiskIndex):
    def __init__(self, path: Path, log: list[Event]) -> None:
        self._log = log
        super().__init__(path)

    def _record(self, before: Images, *, is_checkpoint: bool) -> None:
        keys = frozenset(entry.entry.key for entry in self.load()[0])
        self._log.append(Transaction(before, self._images(), is_checkpoint, keys))

    def _images(self) -> Images:
        files = (self._path, self._path.with_name(WAL))
        return {path.name: path.read_bytes() if path.exists() else b"" for path in files}

    def apply(
        self, removed: Iterable[int] = (), added: Iterable[StoredEntry] = (), used: Iterable[StoredEntry] = ()
    ) -> None:
        before = self._images()
        super().apply(removed, added, used)
        self._record(before, is_checkpoint=False)

    def checkpoint(self) -> None:
        before = self._images()
        super().checkpoint()
        self._record(before, is_checkpoint=True)


@dataclass
class Recorder:
    """A store whose writes and syncs are recorded."""

    directory: Path
    log: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        slot = take_slot(self.directory)
        data = RecordedData(slot.open_file(DATA), LIMIT // PAGE_BYTES, self.log)
        slot.open_index()
        self.index = RecordedIndex(slot.path / INDEX, self.log)
        self.others = {
            name: content for name, content in files_of(self.directory).items() if not name.startswith("slot-0/")
        }
        self.store = DiskStore(slot, self.index, data, IDENTITY, LIMIT)


@dataclass(frozen=True)
class Cut:
    """State of the medium after a loss of power.

    Attributes:
        files: The slot's files.
        states: The sets of entries of which exactly one must be there.
    """

    files: Images
    states: tuple[frozenset[EntryKey], ...]


def cuts(log: Sequence[Event], rng: random.Random) -> Iterator[Cut]:
    """A state that a loss of power may leave, before and within each event."""
    medium, pending = bytearray(), list[Write]()
    images: Images | None = None
    keys: frozenset[EntryKey] = frozenset()
    for event in log:
        if images is not None:
            yield Cut(images | {DATA: _with_some(medium, pending, rng)}, (keys,))
        if isinstance(event, Write):
            pending.append(event)
        elif isinstance(event, Grown):
            medium.extend(bytes(event.size - len(medium)))
        elif isinstance(event, Emptied):
            medium.clear()
            pending.clear()
        elif isinstance(event, Synced):
            for write in pending:
                medium[write.position : write.position + len(write.data)] = write.data
            pending.clear()
        else:
            torn = _torn_checkpoint if event.is_checkpoint else _torn_transaction
            data = _with_some(medium, pending, rng)
            yield Cut(torn(event, rng) | {DATA: data}, (keys, event.keys))
            images, keys = event.after, event.keys


def _with_some(medium: bytearray, pending: Sequence[Write], rng: random.Random) -> bytes:
    """The medium with some of the sectors that were written and not synced."""
    image = bytearray(medium)
    share = rng.random()
    for write in rng.sample(pending, len(pending)):
        for start in range(0, len(write.data), SECTOR):
            if rng.random() < share:
                sector = write.data[start : start + SECTOR]
                image[write.position + start : write.position + start + len(sector)] = sector
    return bytes(image)


def _mixed(before: bytes, after: bytes, rng: random.Random) -> bytes:
    """A file of which some sectors have been written."""
    size, share = rng.choice((len(before), len(after), max(len(before), len(after)))), rng.random()
    image = bytearray(before.ljust(size, b"\0")[:size])
    for start in range(0, min(size, len(after)), SECTOR):
        if rng.random() < share:
            image[start : start + SECTOR] = after[start : min(start + SECTOR, size)]
    return bytes(image)


def _torn_transaction(event: Transaction, rng: random.Random) -> Images:
    assert event.before[INDEX] == event.after[INDEX], "a transaction writes to the log alone"
    grown = len(event.after[WAL]) >= len(event.before[WAL])
    assert grown, "a transaction appends to the log"
    return {INDEX: event.before[INDEX], WAL: _mixed(event.before[WAL], event.after[WAL], rng)}


def _torn_checkpoint(event: Transaction, rng: random.Random) -> Images:
    if rng.random() < 0.3:
        return {INDEX: event.after[INDEX], WAL: event.before[WAL]}  # the index is synced, the log is not empty yet
    return {INDEX: _mixed(event.before[INDEX], event.after[INDEX], rng), WAL: event.before[WAL]}
