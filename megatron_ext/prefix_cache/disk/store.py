"""Store of cache entries in a directory: within a budget of bytes, whole or absent after a crash, verified when read.

Order on the medium: an entry's bytes are written to free pages, synced, and then its row is committed. Pages are free
again only when the removal of their row has been committed. So a crash at any point leaves entries that are whole, or
absent. What a fault changes later is noticed: a row by its seal, bytes by their checksum, tokens by the block hash.
Such an entry is dropped, counted, and is a miss.

A failure of the directory itself (no room on the device, a file that is gone) ends the use of the store: it says so
once, and from then on finds and takes nothing.
"""

from __future__ import annotations

import logging
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeVar

from megatron_ext.errors import ConfigError
from megatron_ext.prefix_cache.disk.data_file import (
    PAGE_BYTES,
    Buffer,
    DataFile,
    Extent,
    FreePages,
    checksum_of,
    pages_of,
)
from megatron_ext.prefix_cache.disk.entry import EntryKey, EntryKind, NewEntry, StoredEntry
from megatron_ext.prefix_cache.disk.index import DiskIndex, NewerFormatError, scan_index
from megatron_ext.prefix_cache.disk.slot import (
    DATA,
    INDEX,
    DiskUnavailableError,
    SlotDirectory,
    failure_reason,
    newer_format,
    take_slot,
)
from megatron_ext.prefix_cache.disk.store_use import (
    BAD_BYTES,
    BAD_INDEX,
    BAD_TOKENS,
    EVICTED,
    LESS_WORTH,
    OTHER_IDENTITY,
    TOO_SHORT,
    StoreUse,
)
from megatron_ext.prefix_cache.disk.victims import VictimOrder
from megatron_ext.prefix_cache.hash_chain import HASH_BYTES, packed_tokens
from megatron_ext.trusted_path import UntrustedPathError

logger = logging.getLogger(__name__)
_Result = TypeVar("_Result")

PENDING_BYTES = 64 * 1024**2  # written since the last commit, at most
EVICTION_SHARE = 64  # at least one such part of the budget is freed at once, since each commit waits for the device


class StoreObserver(Protocol):
    """Callbacks on the entries of a store's identity, in the thread that uses the store."""

    def on_stored(self, stored: StoredEntry) -> None:
        """Take note of an entry."""

    def on_removed(self, keys: Iterable[EntryKey]) -> None:
        """Take note that entries are gone: dropped, evicted, or forgotten."""


class DiskStore:
    """Open store. Not thread-safe; only its holder's process has the slot.

    Args:
        slot: Slot of the directory, held by this process.
        index: Index of the slot.
        data: Data file of the slot.
        identity: Identity of the model and of all else that the bytes of entries depend on, 32 bytes.
        limit_bytes: Budget of the data file.

    Attributes:
        slot: The slot.
        problem: Failure that ended the use of the store; None while it is in use.
        observers: Told of each entry of this identity that is stored or gone.
        evicting: Makes a context in which entries to evict are chosen and removed.
    """

    def __init__(
        self, slot: SlotDirectory, index: DiskIndex, data: DataFile, identity: bytes, limit_bytes: int
    ) -> None:
        assert len(identity) == HASH_BYTES, "an identity is a digest"
        self.problem: str | None = None
        self.observers: list[StoreObserver] = []
        self.evicting: Callable[[], AbstractContextManager[None]] = nullcontext
        self._is_closed = False
        self.slot, self._index, self._data = slot, index, data
        self._identity = identity
        self._limit_pages = limit_bytes // PAGE_BYTES
        self._entries: dict[int, StoredEntry] = {}
        self._rows: dict[EntryKey, int] = {}  # of this identity, also the next two
        self._added: dict[int, StoredEntry] = {}  # since the last commit, also the next two
        self._removed: dict[int, tuple[Extent, ...]] = {}
        self._used: dict[int, StoredEntry] = {}
        self._pending_bytes = 0
        self._victims = VictimOrder(self._entries, identity)
        self._use = StoreUse(self._limit_pages * PAGE_BYTES)
        self.drops = self._use.drops
        self._load()

    def _load(self) -> None:
        """Read the index, and drop the rows that cannot be used."""
        scan = scan_index(self._index, self._data.size // PAGE_BYTES)
        self._next_row = 1 + max((entry.row_id for entry in scan.kept), default=0)
        for entry in scan.kept:
            self._keep(entry)
        self.drops.update(scan.dropped.values())
        if scan.dropped:
            self._index.apply(scan.dropped)
        self._fit()
        self._index.checkpoint()
        self._data.shrink()
        self._free = FreePages(self._limit_pages, [extent for one in self._entries.values() for extent in one.extents])

    def _fit(self) -> None:
        """Make entries of a larger budget fit this one: those used longest ago go, others move to pages within it."""
        limit, pages, beyond = self._limit_pages, 0, []
        for entry in sorted(self._entries.values(), key=self._victims.place, reverse=True):
            pages += pages_of(entry.size)
            if pages > limit:
                self._evict(entry)
            elif any(extent.end > limit for extent in entry.extents):
                beyond.append(entry)
        self._change_rows()  # before pages of evicted entries are used again
        while beyond:
            left = self._move(beyond)
            if left == beyond:
                self._evict(left.pop())
                self._change_rows()
            beyond = left

    def _move(self, entries: Sequence[StoredEntry]) -> list[StoredEntry]:
        """Move entries to free pages within the limit; return those without room until the old pages are free, too."""
        limit, moved, left = self._limit_pages, [], []
        used = [extent for one in self._entries.values() for extent in one.extents if extent.start < limit]
        free = FreePages(limit, [Extent(one.start, min(one.end, limit) - one.start) for one in used])
        for entry in entries:
            into, pages = bytearray(entry.size), pages_of(entry.size)
            fault = self._fault(entry, [into], None)
            if fault is None and pages > free.count:
                left.append(entry)
                continue
            self._remove(entry, fault)
            if fault is None:
                moved.append(replace(entry, row_id=self._next_row, extents=free.take(pages)))
                self._next_row += 1
                self._data.write(moved[-1].extents, [into])
                self._keep(moved[-1])
        self._data.sync()
        self._change_rows(moved)
        return left

    def _change_rows(self, added: Sequence[StoredEntry] = ()) -> None:
        self._index.apply(self._removed, added)
        self._removed.clear()

    def _evict(self, entry: StoredEntry) -> None:
        self._remove(entry, EVICTED if entry.identity == self._identity else OTHER_IDENTITY)

    def _keep(self, entry: StoredEntry) -> None:
        self._entries[entry.row_id] = entry
        if entry.identity == self._identity:
            self._rows[entry.entry.key] = entry.row_id
            self._use.add(entry)
        self._victims.add(entry)

    # Entries

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, key: EntryKey) -> bool:
        """Return whether an entry of this identity is stored."""
        return key in self._rows

    def entries(self) -> list[StoredEntry]:
        """Return the entries of this identity, those used last first, a parent before its children."""
        own = [self._entries[row_id] for row_id in self._rows.values()]
        return sorted(own, key=lambda entry: entry.order, reverse=True)

    def all_entries(self) -> list[StoredEntry]:
        """Return the entries of all identities, for tools."""
        return list(self._entries.values())

    def find(self, key: EntryKey) -> StoredEntry | None:
        """Return the entry of this identity for a key, or None."""
        row_id = self._rows.get(key)
        return None if row_id is None else self._entries[row_id]

    def put(self, entry: NewEntry, buffers: Sequence[Buffer]) -> bool:
        """Store an entry, evicting those used longer ago if there is no room.

        It can be found at once, and outlives the process after the next `commit`.

        Args:
            entry: Genuine entry that is not stored yet; see `NewEntry.is_genuine`.
            buffers: Bytes of the entry; none for a block of a model without attention layers.

        Returns:
            False if it was not stored: there is no room, or the store is off.
        """
        assert entry.is_genuine, "the block hash does not match the tokens"
        with self._use.writing():
            return self._guarded(lambda: self._put(entry, buffers), False)

    def _put(self, entry: NewEntry, buffers: Sequence[Buffer]) -> bool:
        assert entry.key not in self._rows, "this entry is stored already"
        size = sum(memoryview(buffer).nbytes for buffer in buffers)
        entry = replace(entry, tokens=packed_tokens(entry.tokens))
        stored = StoredEntry(self._next_row, self._identity, entry, (), size, checksum_of(buffers))
        if not self._make_room(pages_of(size), stored):
            self.drops[LESS_WORTH] += 1
            return False
        extents = self._free.take(pages_of(size))
        stored = replace(stored, extents=extents)
        self._next_row += 1
        self._data.write(extents, buffers)
        self._added[stored.row_id] = stored
        self._keep(stored)
        for observer in self.observers:
            observer.on_stored(stored)
        self._use.written += 1
        self._use.written_bytes += size
        self._pending_bytes += size
        if self._pending_bytes >= PENDING_BYTES:
            self._commit()
        return True

    def _make_room(self, pages: int, entry: StoredEntry) -> bool:
        """Evict until `pages` are free; return False, evicting nothing, if entries used after `entry` had to go."""
        if pages <= self._free.count:
            return True
        if self._removed:
            self._commit()
        missing = pages - self._free.count
        if missing <= 0:
            return True
        enough = max(missing, self._limit_pages // EVICTION_SHARE)
        with self.evicting():
            chosen = self._victims.take(missing, enough, entry)
            for known in chosen:
                self._evict(known)
        if chosen:
            self._commit()
        return bool(chosen)

    def read(self, key: EntryKey, into: Sequence[Buffer], tokens: Sequence[int] | None = None) -> bool:
        """Fill writable buffers with an entry's bytes, and verify all that is stored of it.

        Args:
            key: Key of the entry.
            into: Buffers, as large together as the entry.
            tokens: Token ids that the block should have; None if they are known by the block hash alone.

        Returns:
            False if there is no such entry, or it failed and was dropped: then the buffers' contents are undefined.
        """
        with self._use.reading():
            return self._guarded(lambda: self._read_entry(key, into, tokens), False)

    def _read_entry(self, key: EntryKey, into: Sequence[Buffer], tokens: Sequence[int] | None) -> bool:
        known = self.find(key)
        if known is None:
            return False
        fault = self._fault(known, into, tokens)
        if fault is not None:
            self._remove(known, fault)
            return False
        self._use.read += 1
        self._use.read_bytes += known.size
        return True

    def _fault(self, known: StoredEntry, into: Sequence[Buffer], tokens: Sequence[int] | None) -> str | None:
        """Read an entry and return the reason why it cannot be used; None if it is sound."""
        if not known.entry.is_genuine or (tokens is not None and list(known.entry.tokens) != list(tokens)):
            return BAD_TOKENS
        if sum(memoryview(buffer).nbytes for buffer in into) != known.size or not self._data.read(known.extents, into):
            return TOO_SHORT
        return None if checksum_of(into) == known.checksum else BAD_BYTES

    def verify(self) -> int:
        """Read all entries of all identities, drop damaged ones, and return the number of sound ones."""
        self._guarded(self._verify, None)
        return len(self._entries)

    def _verify(self) -> None:
        for entry in self.all_entries():
            fault = self._fault(entry, [bytearray(entry.size)], None)
            if fault is not None:
                self._remove(entry, fault)
        self._commit()

    def touch(self, key: EntryKey, used: float) -> None:
        """Give a stored entry another time of last use."""
        known = self.find(key)
        if known is not None:
            later = known.used_at(used)
            self._entries[known.row_id] = later
            (self._added if known.row_id in self._added else self._used)[known.row_id] = later
            self._victims.add(later)

    def remove(self, key: EntryKey, reason: str | None = None) -> None:
        """Remove the entry of a key, if there is one; it is gone from the medium after the next `commit`."""
        known = self.find(key)
        if known is not None:
            self._remove(known, reason)

    def _remove(self, entry: StoredEntry, reason: str | None = None) -> None:
        row_id = entry.row_id
        del self._entries[row_id]
        if entry.identity == self._identity:
            del self._rows[entry.entry.key]
            self._use.add(entry, -1)
            for observer in self.observers:
                observer.on_removed([entry.entry.key])
        self._used.pop(row_id, None)
        self._removed[row_id] = entry.extents
        if reason is not None:
            self.drops[reason] += 1

    def commit(self) -> None:
        """Return when all changes are on the medium."""
        with self._use.writing():
            self._guarded(self._commit, None)

    def _commit(self) -> None:
        added = {row_id: entry for row_id, entry in self._added.items() if row_id not in self._removed}
        removed = [row_id for row_id in self._removed if row_id not in self._added]
        if not (added or removed or self._used or self._removed):
            return
        self.slot.check()
        if added:
            self._data.sync()
        self._index.apply(removed, added.values(), self._used.values())
        for extents in self._removed.values():
            self._free.give(extents)
        self._added.clear()
        self._removed.clear()
        self._used.clear()
        self._pending_bytes = 0

    def forget(self, keys: Iterable[EntryKey], reason: str | None = None) -> None:
        """Forget entries, which count as dropped for a reason if one is given; the medium has forgotten them, too.

        If that fails, or the store is off, its files are removed, as far as that is possible.
        """
        assert not self._is_closed, "another process may hold the slot"
        for key in keys:
            self.remove(key, reason)
        self.commit()
        if self.problem is not None:
            self.erase()

    def clear(self) -> None:
        """Forget all entries of this identity, see `forget`; without entries of others nothing is left in the files."""
        self.forget(list(self._rows))
        if self.problem is None and not self._entries:
            self._guarded(self._empty, None)
            if self.problem is not None:
                self.erase()

    def _empty(self) -> None:
        """Leave nothing of removed entries in the files; their rows are gone from the medium."""
        self._index.checkpoint()
        self._data.clear()
        self._free = FreePages(self._limit_pages, ())

    def erase(self) -> None:
        """Forget everything and remove the files of the slot; the store is off after that."""
        assert not self._is_closed, "another process may hold the slot"
        if self.problem is None:
            self.problem = "its files were removed"
            self._shut()
        self._forget_all()
        try:
            self.slot.remove_index()
            self.slot.remove(DATA)
        except OSError as error:
            logger.warning("prefix cache on disk: %s: files cannot be removed: %s", self.slot.path, error.strerror)

    def close(self) -> None:
        """Commit, close all files, and give the slot up."""
        self.commit()
        if self.problem is None:
            self._guarded(self._shut, None)
        if not self._is_closed:
            self._is_closed = True
            self.slot.close()

    # Failures

    def _guarded(self, action: Callable[[], _Result], otherwise: _Result) -> _Result:
        """Return the result of an action; after a failure of the directory the store is off, which is said once."""
        if self.problem is not None or self._is_closed:
            return otherwise
        try:
            return action()
        except Exception as error:
            self.fail(error)
            return otherwise

    def fail(self, error: Exception) -> None:
        """End the use of the store after an error, which is said once."""
        if self.problem is not None:
            return
        self.problem = failure_reason(error)
        cause = None if isinstance(error, (OSError, sqlite3.Error)) else error
        logger.warning(
            "prefix cache on disk: %s: %s; serving goes on without it", self.slot.path, self.problem, exc_info=cause
        )
        self._forget_all()
        try:
            self._shut()
        except (OSError, sqlite3.Error):
            logger.info("prefix cache on disk: its files could not be closed in order")

    def _forget_all(self) -> None:
        for observer in self.observers:
            observer.on_removed(self._rows)
        self._entries.clear()
        self._rows.clear()
        self._use.blocks = self._use.snapshots = self._use.bytes = 0

    def _shut(self) -> None:
        try:
            self._index.close()
        finally:
            self._data.close()

    # Statistics

    @property
    def use(self) -> StoreUse:
        """Present counts."""
        others, is_on = len(self._entries) - len(self._rows), self.problem is None
        return replace(self._use, other_entries=others, is_on=is_on, drops=self.drops.copy())

    def check(self) -> None:
        """Assert that every page is free, waits for a commit, or belongs to one entry."""
        if self.problem is None:
            used = [extent for entry in self._entries.values() for extent in entry.extents]
            waiting = [extent for extents in self._removed.values() for extent in extents]
            self._free.check([*used, *waiting])
            assert set(self._rows.values()) <= self._entries.keys(), "a key without an entry"
            kinds = Counter(key.kind for key in self._rows)
            counts = self._use.blocks, self._use.snapshots
            assert counts == (kinds[EntryKind.BLOCK], kinds[EntryKind.SNAPSHOT]), "entries miscounted"
            pages = sum(pages_of(self._entries[row_id].size) for row_id in self._rows.values())
            assert self._use.bytes == PAGE_BYTES * pages, "pages miscounted"
            assert self._data.size <= self._limit_pages * PAGE_BYTES, "the file is longer than its limit"


def open_directory_store(directory: Path, identity: bytes, limit_bytes: int) -> DiskStore:
    """Take a slot of a directory and open the store in it.

    Args:
        directory: The directory, created if missing.
        identity: See `DiskStore`, also for the next one.
        limit_bytes: Budget of the data file.

    Raises:
        ConfigError: The directory is not for this, or other users can write to it; see `take_slot`.
        DiskUnavailableError: The directory cannot be used now.
    """
    slot = take_slot(directory)
    try:
        return open_store(slot, identity, limit_bytes)
    except BaseException:
        slot.close()
        raise


def open_store(slot: SlotDirectory, identity: bytes, limit_bytes: int) -> DiskStore:
    """Open the store in a slot; a damaged index is replaced by an empty one, which is said once.

    Raises:
        ConfigError: The index has a newer format, or a file may have been written by another user.
        DiskUnavailableError: The slot's files cannot be read or written now.
    """
    try:
        data = DataFile(slot.open_file(DATA), limit_bytes // PAGE_BYTES)
        try:
            try:
                return _with_index(slot, data, identity, limit_bytes)
            except sqlite3.OperationalError:
                raise
            except sqlite3.DatabaseError as error:
                logger.warning(
                    "prefix cache on disk: %s: the index cannot be used (%s); it begins empty", slot.path, error
                )
                slot.remove_index()
                data.clear()
                store = _with_index(slot, data, identity, limit_bytes)
                store.drops[BAD_INDEX] += 1
                return store
        except BaseException:
            data.close()
            raise
    except NewerFormatError as error:
        raise newer_format(f"{slot.path}/{INDEX}", str(error)) from None
    except UntrustedPathError as error:
        raise ConfigError(str(error)) from None
    except (OSError, sqlite3.Error) as error:
        raise DiskUnavailableError(f"{slot.path}: {failure_reason(error)}") from None


def _with_index(slot: SlotDirectory, data: DataFile, identity: bytes, limit_bytes: int) -> DiskStore:
    slot.open_index()
    index = DiskIndex(slot.path / INDEX, may_be_new=not data.size)
    try:
        return DiskStore(slot, index, data, identity, limit_bytes)
    except BaseException:
        index.close()
        raise
