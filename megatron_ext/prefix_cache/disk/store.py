"""Store of cache entries in a directory: within a budget of bytes, whole or absent after a crash, verified when read.

Each entry is a file, see `entry_files.py`. What a fault changes is noticed at the next read: such an entry is dropped,
counted, and is a miss. What the store forgets is gone from the medium before the call returns.

Without room on the device, without memory, or with too many open files, an entry is not taken, or is dropped and is a
miss. A failure of the directory itself (an error of the device, a folder that is gone) ends the use of the store: it
says so once, and from then on finds and takes nothing.
"""

from __future__ import annotations

import errno
import logging
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from heapq import heapify, heappop, heappush
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from megatron_ext.errors import ConfigError
from megatron_ext.prefix_cache.disk.entry import PAGE_BYTES, Buffer, EntryKey, EntryKind, NewEntry, StoredEntry
from megatron_ext.prefix_cache.disk.entry_files import DamagedEntryError, EntryFiles
from megatron_ext.prefix_cache.disk.slot import DiskUnavailableError, SlotDirectory, failure_reason, take_slot
from megatron_ext.prefix_cache.disk.store_use import (
    BAD_TOKENS,
    EVICTED,
    LESS_WORTH,
    NO_ROOM,
    OTHER_IDENTITY,
    TOO_SHORT,
    StoreUse,
)
from megatron_ext.prefix_cache.hash_chain import HASH_BYTES, packed_tokens
from megatron_ext.trusted_path import UntrustedPathError

logger = logging.getLogger(__name__)
_Result = TypeVar("_Result")

MIN_HEAP = 64  # places below which old ones are left
FULL = errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE, errno.ENOMEM  # errors that may pass


class StoreObserver(Protocol):
    """Callbacks on the entries of a store's identity, in the thread that uses the store."""

    def on_stored(self, entry: NewEntry) -> None:
        """Take note of an entry."""

    def on_removed(self, keys: Iterable[EntryKey]) -> None:
        """Take note that entries are gone: dropped, evicted, or forgotten."""


class DiskStore:
    """Open store. Not thread-safe; only its holder's process has the slot.

    Args:
        slot: Slot of the directory, held by this process.
        identity: Identity of the model and of all else that the bytes of entries depend on, 32 bytes.
        limit_bytes: Budget of the files.

    Attributes:
        slot: The slot.
        problem: Failure that ended the use of the store; None while it is in use.
        observers: Told of each entry of this identity that is stored or gone.
        evicting: Makes a context in which entries to evict are chosen and forgotten.
        drops: Entries that were dropped, or not taken, by reason.

    Raises:
        UntrustedPathError: A file may have been written by another user.
        OSError: The slot's files cannot be read or removed now.
    """

    def __init__(self, slot: SlotDirectory, identity: bytes, limit_bytes: int) -> None:
        assert len(identity) == HASH_BYTES, "an identity is a digest"
        self.problem: str | None = None
        self.observers: list[StoreObserver] = []
        self.evicting: Callable[[], AbstractContextManager[None]] = nullcontext
        self._is_closed = False
        self.slot, self._files = slot, EntryFiles(slot.handle)
        self._identity = identity
        self._limit_pages, self._pages = limit_bytes // PAGE_BYTES, 0
        self._entries: dict[tuple[bytes, EntryKey], StoredEntry] = {}
        self._touched: set[EntryKey] = set()  # since the last commit
        self._is_changed = False  # likewise
        self._victims = VictimOrder(self._entries, identity)
        self._use = StoreUse(self._limit_pages * PAGE_BYTES)
        self.drops = self._use.drops
        for entry in self._files.entries():
            if (entry.identity, entry.key) in self._entries:  # one of the two is wrong
                self._files.remove(entry)
                self.drops[BAD_TOKENS] += 1
                continue
            self._keep(entry)
            if entry.size < entry.head_bytes:
                self._remove(entry, TOO_SHORT)
        self._make_room(0)

    def _keep(self, entry: StoredEntry) -> None:
        self._entries[entry.identity, entry.key] = entry
        self._pages += entry.pages
        if entry.identity == self._identity:
            self._use.add(entry)
        self._victims.add(entry)

    # Entries

    def __len__(self) -> int:
        return self._use.entries

    def __contains__(self, key: EntryKey) -> bool:
        """Return whether an entry of this identity is stored."""
        return (self._identity, key) in self._entries

    def entries(self) -> list[StoredEntry]:
        """Return the entries of this identity, those used last first, a parent before its children."""
        own = [entry for entry in self._entries.values() if entry.identity == self._identity]
        return sorted(own, key=lambda entry: entry.order, reverse=True)

    def all_entries(self) -> list[StoredEntry]:
        """Return the entries of all identities, for tools."""
        return list(self._entries.values())

    def find(self, key: EntryKey) -> StoredEntry | None:
        """Return the entry of this identity for a key, or None."""
        return self._entries.get((self._identity, key))

    def put(self, entry: NewEntry, buffers: Sequence[Buffer]) -> bool:
        """Store an entry, evicting those used longer ago if there is no room.

        It can be found at once, and outlives the process.

        Args:
            entry: Genuine entry that is not stored yet; see `NewEntry.is_genuine`.
            buffers: Bytes of the entry; none for a block of a model without attention layers.

        Returns:
            False if it was not stored: there is no room, or the store is off.
        """
        assert entry.is_genuine, "the block hash does not match the tokens"
        with self._use.timed("write_seconds"):
            return self._guarded(lambda: self._put(entry, buffers), False)

    def _put(self, entry: NewEntry, buffers: Sequence[Buffer]) -> bool:
        assert entry.key not in self, "this entry is stored already"
        size, tokens = sum(memoryview(buffer).nbytes for buffer in buffers), packed_tokens(entry.tokens)
        stored = StoredEntry(self._identity, entry.key, entry.parent, entry.depth, entry.used, len(tokens), size)
        stored = replace(stored, size=stored.head_bytes + size)
        if not self._make_room(stored.pages, stored):
            self.drops[LESS_WORTH] += 1
            return False
        try:
            self._files.write(stored, tokens, buffers)
        except (OSError, MemoryError) as error:
            self.leave_out(error)
            return False
        self._is_changed = True
        self._keep(stored)
        for observer in self.observers:
            observer.on_stored(entry)
        self._use.written += 1
        self._use.written_bytes += size
        return True

    def _make_room(self, pages: int, entry: StoredEntry | None = None) -> bool:
        """Evict until `pages` are free; return False, evicting nothing, if entries used after `entry` had to go."""
        missing = self._pages + pages - self._limit_pages
        if missing <= 0:
            return True
        with self.evicting():
            chosen = self._victims.take(missing, entry)
            for known in chosen:
                self._take_out(known, EVICTED if known.identity == self._identity else OTHER_IDENTITY)
        for known in chosen:
            self._files.remove(known)
        return bool(chosen)

    def read(self, key: EntryKey, into: Sequence[Buffer], tokens: Sequence[int] | None = None) -> array[int] | None:
        """Fill writable buffers with an entry's bytes, and verify all that is stored of it.

        Args:
            key: Key of the entry.
            into: Buffers, as large together as the entry.
            tokens: Token ids that the block should have; None if they are known by the block hash alone.

        Returns:
            Token ids of the block; None if there is no such entry, or it failed and was dropped: then the buffers'
            contents are undefined.
        """
        with self._use.timed("read_seconds"):
            return self._guarded(lambda: self._read(key, into, tokens), None)

    def _read(self, key: EntryKey, into: Sequence[Buffer], tokens: Sequence[int] | None) -> array[int] | None:
        known = self.find(key)
        if known is None:
            return None
        found = self._unless_damaged(known, lambda known: self._files.read(known, into))
        if found is not None and tokens is not None and list(found) != list(tokens):
            self._remove(known, BAD_TOKENS)
            return None
        if found is not None:
            self._use.read += 1
            self._use.read_bytes += known.size - known.head_bytes
        return found

    def _unless_damaged(self, entry: StoredEntry, read: Callable[[StoredEntry], array[int]]) -> array[int] | None:
        """Return the token ids of an entry; if it is damaged, or cannot be opened, drop it and return None."""
        try:
            return read(entry)
        except DamagedEntryError as error:
            self._remove(entry, str(error))
        except (OSError, MemoryError) as error:
            self.leave_out(error)
            self._remove(entry)
        return None

    def leave_out(self, error: OSError | MemoryError) -> None:
        """Count an entry lost for want of room, memory or open files, said once; raise any other error again."""
        if isinstance(error, OSError) and error.errno not in FULL:
            raise error
        if not self.drops[NO_ROOM]:
            reason = failure_reason(error)
            logger.warning("prefix cache on disk: %s: %s; entries are left out", self.slot.path, reason)
        self.drops[NO_ROOM] += 1

    def describe(self, entry: StoredEntry) -> NewEntry | None:
        """Return the description that the cache gave of a stored entry; None if it is damaged, and dropped."""
        tokens = self._guarded(lambda: self._unless_damaged(entry, self._files.read_tokens), None)
        return None if tokens is None else entry.described(tokens)

    def verify(self) -> int:
        """Read all entries of all identities, drop damaged ones, and return the number of sound ones."""
        self._guarded(self._verify, None)
        return len(self._entries)

    def _verify(self) -> None:
        for entry in self.all_entries():
            self._unless_damaged(entry, lambda one: self._files.read(one, [bytearray(one.size - one.head_bytes)]))
        self._commit()

    def touch(self, key: EntryKey, used: float) -> None:
        """Give a stored entry another time of last use, which outlives the process after the next `commit`."""
        known = self.find(key)
        if known is not None:
            later = self._entries[self._identity, key] = replace(known, used=used)
            self._touched.add(key)
            self._victims.add(later)

    def _remove(self, entry: StoredEntry, reason: str | None = None) -> None:
        self._take_out(entry, reason)
        self._files.remove(entry)

    def _take_out(self, entry: StoredEntry, reason: str | None) -> None:
        """Remove an entry from all but the medium."""
        del self._entries[entry.identity, entry.key]
        self._pages -= entry.pages
        self._is_changed = True
        if entry.identity == self._identity:
            self._touched.discard(entry.key)
            self._use.add(entry, -1)
            for observer in self.observers:
                observer.on_removed([entry.key])
        if reason is not None:
            self.drops[reason] += 1

    @property
    def has_changes(self) -> bool:
        """True if there is something to commit."""
        return self._is_changed or bool(self._touched)

    def commit(self) -> None:
        """Pass times of use to the files, and return when no removed entry is on the medium any more."""
        with self._use.timed("write_seconds"):
            self._guarded(self._commit, None)

    def _commit(self) -> None:
        self.slot.check()
        for key in self._touched:
            self._files.set_used(self._entries[self._identity, key])
        self._touched.clear()
        if self._is_changed:
            self._files.sync()
            self._is_changed = False

    def forget(self, keys: Iterable[EntryKey], reason: str | None = None) -> None:
        """Forget entries, which count as dropped for a reason if one is given; the medium has forgotten them, too.

        If that fails, or the store is off, all entries are removed, as far as that is possible.
        """
        assert not self._is_closed, "another process may hold the slot"
        self._guarded(lambda: self._forget(keys, reason), None)
        if self.problem is not None:
            self.erase()

    def _forget(self, keys: Iterable[EntryKey], reason: str | None) -> None:
        for known in filter(None, map(self.find, keys)):
            self._remove(known, reason)
        self._commit()

    def clear(self) -> None:
        """Forget all entries of this identity, see `forget`."""
        self.forget([entry.key for entry in self.entries()])

    def erase(self) -> None:
        """Remove the entries of all identities; the store is off after that."""
        assert not self._is_closed, "another process may hold the slot"
        self.problem = self.problem or "its files were removed"
        self._forget_all()
        try:
            self._files.erase()
        except (OSError, UntrustedPathError) as error:
            reason = failure_reason(error)
            logger.warning("prefix cache on disk: %s: files cannot be removed: %s", self.slot.path, reason)

    def close(self) -> None:
        """Commit, and give the slot up."""
        self.commit()
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
        cause = None if isinstance(error, OSError) else error
        logger.warning(
            "prefix cache on disk: %s: %s; serving goes on without it", self.slot.path, self.problem, exc_info=cause
        )
        self._forget_all()

    def _forget_all(self) -> None:
        own = [entry.key for entry in self.entries()]
        for observer in self.observers:
            observer.on_removed(own)
        self._entries.clear()
        self._use.blocks = self._use.snapshots = self._use.bytes = 0

    # Statistics

    @property
    def use(self) -> StoreUse:
        """Present counts."""
        others, is_on = len(self._entries) - len(self), self.problem is None
        return replace(self._use, other_entries=others, is_on=is_on, drops=self.drops.copy())

    def check(self) -> None:
        """Assert that each entry has its file, within the budget, and is counted."""
        if self.problem is None:
            known = self._entries.values()
            names = sorted(entry.name for entry in known)
            assert all(key in self for key in self._touched), "uses of entries that are gone"
            assert names == sorted(entry.name for entry in self._files.entries()), "not the entries of the files"
            assert self._pages == sum(entry.pages for entry in known) <= self._limit_pages, "pages miscounted"
            own = self.entries()
            kinds = Counter(entry.key.kind for entry in own)
            counts = self._use.blocks, self._use.snapshots
            assert counts == (kinds[EntryKind.BLOCK], kinds[EntryKind.SNAPSHOT]), "entries miscounted"
            assert self._use.bytes == PAGE_BYTES * sum(entry.pages for entry in own), "bytes miscounted"


class Victim(NamedTuple):
    """Place of an entry in the order."""

    is_own: bool
    order: tuple[float, int]
    identity: bytes
    key: EntryKey


class VictimOrder:
    """Order in which the store evicts: entries of other identities first, then least recently used entries.

    A heap, in which entries that are gone or have moved since are skipped.

    Args:
        entries: Entries of the store by identity and key, as the store changes them.
        identity: Identity whose entries are evicted last.
    """

    def __init__(self, entries: Mapping[tuple[bytes, EntryKey], StoredEntry], identity: bytes) -> None:
        self._entries = entries
        self._identity = identity
        self._heap: list[Victim] = []

    def _place(self, entry: StoredEntry) -> Victim:
        """Return the place of an entry in the order."""
        return Victim(entry.identity == self._identity, entry.order, entry.identity, entry.key)

    def add(self, entry: StoredEntry) -> None:
        """Add an entry of the store, or give it another place; old places are dropped once they are the most."""
        heappush(self._heap, self._place(entry))
        if len(self._heap) > 2 * len(self._entries) + MIN_HEAP:
            self._heap = [self._place(one) for one in self._entries.values()]
            heapify(self._heap)

    def take(self, pages: int, before: StoredEntry | None) -> list[StoredEntry]:
        """Remove and return the first entries that together have `pages` pages.

        Args:
            pages: Number of pages needed.
            before: Entry to make room for, if there is one; only entries before it in the order are taken.

        Returns:
            The entries; none, and none is removed, if the entries before `before` have too few pages.
        """
        limit, found = None if before is None else self._place(before), 0
        chosen: list[StoredEntry] = []
        while found < pages and self._heap and (limit is None or self._heap[0] < limit):
            victim = heappop(self._heap)
            entry = self._entries.get((victim.identity, victim.key))
            if entry is not None and self._place(entry) == victim and chosen[-1:] != [entry]:  # places may be equal
                chosen.append(entry)
                found += entry.pages
        if found >= pages:
            return chosen
        for entry in chosen:
            self.add(entry)
        return []


def open_directory_store(directory: Path, identity: bytes, limit_bytes: int) -> DiskStore:
    """Take a slot of a directory and open the store in it.

    Args:
        directory: The directory, created if missing.
        identity: See `DiskStore`, also for the next one.
        limit_bytes: Budget of the files.

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
    """Open the store in a slot.

    Raises:
        ConfigError: A file may have been written by another user.
        DiskUnavailableError: The slot's files cannot be read or removed now.
    """
    try:
        return DiskStore(slot, identity, limit_bytes)
    except UntrustedPathError as error:
        raise ConfigError(str(error)) from None
    except OSError as error:
        raise DiskUnavailableError(f"{slot.path}: {failure_reason(error)}") from None
