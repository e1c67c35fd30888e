"""Budget, order of eviction, identities and failures of the store of cache entries on disk."""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
import resource
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from megatron_ext.prefix_cache.disk import store as disk_store
from megatron_ext.prefix_cache.disk.entry import PAGE_BYTES, EntryKind, NewEntry
from megatron_ext.prefix_cache.disk.entry_files import EntryFiles
from megatron_ext.prefix_cache.disk.store import DiskStore, open_directory_store
from megatron_ext.prefix_cache.disk.store_thread import StoreThread
from megatron_ext.prefix_cache.disk.tier_storage import LoadItem, TierLoad
from megatron_ext.prefix_cache.hash_chain import packed_tokens
from tests.unit_tests.prefix_cache.disk.lives import IDENTITY, LIMIT, entry_after, faults, file_of, is_read, put

OTHER = bytes(32)
PAGES = 16
CONTENT = PAGE_BYTES - 8  # bytes of a file of one page, beside a checksum and one token


@pytest.fixture
def directory(tmp_path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def store(directory) -> Iterator[DiskStore]:
    opened = open_directory_store(directory, IDENTITY, PAGES * PAGE_BYTES)
    yield opened
    opened.close()


def reopened(store: DiskStore, directory: Path, identity: bytes = IDENTITY, pages: int = PAGES) -> DiskStore:
    store.close()
    return open_directory_store(directory, identity, pages * PAGE_BYTES)


def page(number: int, used: float = 0.0) -> NewEntry:
    """An entry that takes one page; see `fill`."""
    return entry_after(None, [number], used=used)


def fill(store: DiskStore, entry: NewEntry) -> bool:
    """Store a page of bytes."""
    return store.put(entry, [bytes([entry.tokens[0]]) * CONTENT])


def numbers(store: DiskStore) -> list[int]:
    """The numbers of the entries, those used last first."""
    return [store.describe(entry).tokens[0] for entry in store.entries()]


def test_entries_outlive_the_process(store, directory):
    """DC-1."""
    first = entry_after(None, [1, 2])
    second = entry_after(first, [3, 4], EntryKind.SNAPSHOT, used=9.0)
    assert put(store, first)
    assert is_read(store, first.key)
    store = reopened(store, directory, pages=64)
    assert put(store, second)
    store = reopened(store, directory, pages=64)
    assert is_read(store, first.key)
    assert is_read(store, second.key)
    found = store.find(second.key)
    assert found is not None
    assert store.describe(found) == dataclasses.replace(second, tokens=packed_tokens([3, 4]))
    use = store.use
    assert (use.blocks, use.snapshots, use.written, use.read) == (1, 1, 0, 2)
    store.close()


def test_what_was_used_longer_ago_than_all_is_not_taken(store):
    for number in range(PAGES):
        assert fill(store, page(number, used=1.0))
    assert not fill(store, page(100, used=0.5))
    assert store.use.drops == {"less_worth": 1}
    assert len(store) == PAGES
    assert not store.put(page(101, used=9.0), [bytes(PAGES * PAGE_BYTES)])
    assert len(store) == PAGES
    assert fill(store, page(102, used=1.0))
    store.check()


class Seen:
    """Observer of a store."""

    def __init__(self) -> None:
        self.keys: set[object] = set()

    def on_stored(self, entry: NewEntry) -> None:
        self.keys.add(entry.key)

    def on_removed(self, keys: Iterable[object]) -> None:
        self.keys.difference_update(keys)


@pytest.mark.parametrize("end", [DiskStore.clear, DiskStore.erase])
def test_observers_know_what_is_stored(store, end):
    """A router would send requests to entries that are gone; counts are those of what is left."""
    store.observers.append(seen := Seen())
    entries = [page(number, used=float(number)) for number in range(PAGES + 3)]
    for one in entries:
        fill(store, one)
        store.touch(one.key, 100.0 - one.used)
    store.check()
    assert seen.keys == {one.key for one in entries if one.key in store}
    assert len(seen.keys) == PAGES
    end(store)
    assert (seen.keys, store.use.blocks, store.use.bytes) == (set(), 0, 0)


def test_an_entry_has_its_last_place_in_the_order_alone(store):
    """What was used again stays, whatever place it had before; what was never used again goes."""
    for number in range(PAGES):
        fill(store, page(number, used=float(number)))
    for number in (0, 1):
        store.touch(page(number).key, 50.0)
    assert fill(store, page(100, used=60.0))
    assert set(range(PAGES)) - set(numbers(store)) == {2}
    assert not fill(store, page(101, used=1.0)), "older than all"
    for number in range(PAGES):
        assert fill(store, page(110 + number, used=90.0 - number)), "those that were used again go, too, in the end"
    store.check()


def test_places_in_the_order_are_bounded_by_the_entries(store):
    """A server that touches what it has would grow by 168 bytes a touch."""
    for number in range(PAGES - 1):
        fill(store, page(number))
    for use in range(1000):
        store.touch(page(use % 7).key, float(use))
    assert len(store._victims._heap) < 200
    assert all(fill(store, page(100 + number, used=5.0)) for number in range(9))
    assert {*range(7)} <= set(numbers(store))


def test_a_use_changes_the_order_also_after_a_restart(store, directory):
    for number in range(PAGES):
        assert fill(store, page(number, used=float(number)))
    store.commit()
    store.touch(page(0).key, 99.0)
    store = reopened(store, directory)
    assert numbers(store)[0] == 0
    assert fill(store, page(100, used=100.0))
    assert 1 not in numbers(store)
    assert is_read_page(store, 0)
    store.close()


def test_what_was_committed_is_not_committed_again(store):
    """EX-11: an idle server would write the same times of use, and sync its directory, for ever."""
    for number in range(PAGES + 1):
        fill(store, page(number, used=float(number)))
    store.touch(page(PAGES).key, 99.0)
    assert store.has_changes
    store.commit()
    assert not store.has_changes


def is_read_page(store: DiskStore, number: int) -> bool:
    into = bytearray(CONTENT)
    return store.read(page(number).key, [into]) is not None and into == bytes([number]) * CONTENT


def test_another_identity_finds_nothing_and_evicts_the_old_one_first(store, directory):
    """DC-2."""
    for number in range(PAGES):
        assert fill(store, page(number, used=100.0))
    store = reopened(store, directory, OTHER)
    assert (len(store), store.use.other_entries) == (0, PAGES)
    assert not is_read_page(store, 3)
    assert fill(store, page(3))
    assert store.use.drops == {"other_identity": 1}
    assert is_read_page(store, 3)
    store.check()
    store = reopened(store, directory)
    assert len(store) == PAGES - 1
    store.clear()
    store = reopened(store, directory, OTHER)
    assert (len(store), store.use.other_entries) == (1, 0)
    store.close()


def test_a_smaller_budget_keeps_what_was_used_last(store, directory):
    """DC-1."""
    for number in range(PAGES - 4):
        assert fill(store, page(number, used=float(number)))
    large = page(99, used=50.0)
    assert store.put(large, [bytes(3 * PAGE_BYTES)])
    store = reopened(store, directory, pages=8)
    assert numbers(store) == [99, 11, 10, 9, 8]
    assert store.use.drops == {"evicted": 8}
    assert all(is_read_page(store, number) for number in (8, 9, 10, 11))
    store.check()
    store = reopened(store, directory, pages=8)
    assert (len(store), store.use.drops) == (5, {})
    store.close()


def test_tokens_are_compared(store):
    entry = page(7)
    fill(store, entry)
    assert list(store.read(entry.key, [bytearray(CONTENT)], [7])) == [7]
    assert store.read(entry.key, [bytearray(CONTENT)], [8]) is None
    assert store.use.drops == {"tokens": 1}


@pytest.mark.parametrize("forget", [DiskStore.clear, DiskStore.erase, lambda store: store.forget([page(1).key])])
def test_forgotten_entries_are_gone_at_once(store, directory, monkeypatch, forget):
    """DC-4: nothing has to follow for the entries to be gone from the medium."""
    fill(store, page(1))
    sync, left = EntryFiles.sync, []
    monkeypatch.setattr(EntryFiles, "sync", lambda files: (sync(files), left.append(os.listdir(directory / "slot-0"))))
    forget(store)
    assert left == [["lock"]]


@pytest.mark.parametrize("rest", [b"", b"x" * 7, b"x" * 100, None])
def test_a_file_that_is_cut_or_gone_is_counted(store, directory, rest):
    """DC-3: at the next start, or at the next read, like all other damage."""
    for number in (1, 2):
        fill(store, page(number))
    path = file_of(directory, page(1).key)
    path.unlink() if rest is None else path.write_bytes(rest)
    assert not is_read_page(store, 1)
    assert len(faults(store)) == 1
    if rest is not None:
        path.write_bytes(rest)
        path.chmod(0o600)
        store = reopened(store, directory)
        assert len(store) == 1 + (len(rest) >= 8), "an entry without its head is dropped at once"
        assert not is_read_page(store, 1)
        assert len(faults(store)) == 1
    assert not path.exists()
    assert is_read_page(store, 2)
    store.check()
    store.close()


def test_bytes_under_another_name_are_a_miss(store, directory):
    """DC-3: the bytes are whole, and those of another block."""
    first, second = page(1), page(2)
    fill(store, first)
    fill(store, second)
    os.replace(file_of(directory, first.key), file_of(directory, second.key))
    assert not is_read_page(store, 2)
    assert len(faults(store)) == 1
    entry = entry_after(None, [3], EntryKind.SNAPSHOT)
    store.put(entry, [bytes([3]) * CONTENT])
    path = file_of(directory, entry.key)
    path.rename(path.with_suffix(".kv"))
    store = reopened(store, directory)
    assert not is_read_page(store, 3)
    assert faults(store) == {"checksum": 1}
    store.close()


def test_a_folder_that_vanishes_ends_the_use_of_the_store(store, directory, caplog):
    """DC-3: one line, and no error for the caller."""
    assert fill(store, page(1))
    shutil.rmtree(directory / "slot-0")
    with caplog.at_level(logging.WARNING):
        assert not fill(store, page(2))
        store.commit()
    assert ["No such file" in record.getMessage() for record in caplog.records] == [True]
    assert not store.use.is_on
    assert (len(store), store.entries(), store.find(page(1).key)) == (0, [], None)


def test_an_entry_without_room_on_the_device_is_left_out(directory, caplog):
    """DC-3: a limit on the size of files stands for a full device; what fits is still stored."""
    store = open_directory_store(directory, IDENTITY, LIMIT)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT // 4, before[1]))
        with caplog.at_level(logging.WARNING):
            stored = [store.put(page(number), [bytes(LIMIT // size)]) for number, size in enumerate((8, 8, 2, 8, 2))]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert stored == [True, True, False, True, False]
    assert len(os.listdir(directory / "slot-0")) == 4, "the room of what was not written is free again"
    assert (len(caplog.records), store.use.is_on, store.use.drops) == (1, True, {"no_room": 2})
    store.check()
    store.close()


def test_too_many_open_files_cost_single_entries(store, caplog):
    """DC-3: what cannot be opened is a miss, or is left out, and the store goes on."""
    for number in (1, 2):
        fill(store, page(number))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
        assert not is_read_page(store, 1)
        assert not fill(store, page(3))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert ["Too many open files" in one for one in caplog.messages] == [True]
    assert (numbers(store), store.problem, store.use.drops) == ([2], None, {"no_room": 2})
    assert is_read_page(store, 2)
    store.check()


@pytest.mark.parametrize("error", [OSError(errno.ENOMEM, "no memory"), MemoryError("no memory")], ids=type)
def test_too_little_memory_costs_single_entries(store, monkeypatch, caplog, error):
    """DC-3: of the kernel or of the process, for a file or for the bytes of an entry."""

    def fail(*_: object, **__: object) -> None:
        raise error

    for number in range(4):
        fill(store, page(number))
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", fail)
        assert not is_read_page(store, 0)
        assert store.describe(store.find(page(1).key)) is None
        assert not fill(store, page(4))
    thread, load = StoreThread(store), TierLoad(1, [LoadItem(page(2).key, [2**62])], 0, 0.0)
    thread.load(load)
    thread.run(len)
    thread.wait([load], 100)
    assert load.own_progress == 0
    assert thread.gone() == [page(2).key], "it is not counted again, as one that another rank lacks"
    with monkeypatch.context() as patch:
        patch.setattr(disk_store, "bytearray", fail, raising=False)
        assert thread.run(DiskStore.verify) == 0
    assert ["no memory" in one for one in caplog.messages] == [True]
    assert (store.problem, store.use.drops) == (None, {"no_room": 5})
    assert thread.stop(100)


def test_equal_places_in_the_order_are_one_entry(store):
    """An entry used twice at the same time was evicted twice, which ended the use of the store."""
    for number in range(PAGES):
        fill(store, page(number))
    store.touch(page(3).key, -1.0)
    store.touch(page(3).key, -1.0)
    assert store.put(page(100, used=9.0), [bytes(CONTENT + PAGE_BYTES)])
    assert (len(store), store.problem) == (PAGES - 1, None)
    store.check()


def test_of_two_files_of_one_entry_one_is_removed(store, directory):
    """DC-3: its bytes would be in no count, and a `clear` would leave it."""
    fill(store, page(1))
    path = file_of(directory, page(1).key)
    shutil.copy(path, path.with_name(path.name.replace("-1-1.kv", "-2-1.kv")))
    store = reopened(store, directory)
    assert faults(store) == {"tokens": 1}
    store.check()
    store.close()


def test_a_lock_that_was_replaced_ends_the_use_of_the_store(store, directory, caplog):
    """DC-4: another process may have locked the new one."""
    fill(store, page(1))
    (directory / "slot-0" / "lock").unlink()
    (directory / "slot-0" / "lock").touch(0o600)
    store.commit()
    assert "the lock was replaced" in caplog.text
    assert not store.use.is_on


def test_erase_removes_the_files_of_the_slot_alone(store, directory):
    """DC-4."""
    foreign = directory / "slot-0" / "notes.txt"
    foreign.write_text("mine")
    fill(store, page(1))
    store.erase()
    assert sorted(os.listdir(directory / "slot-0")) == ["lock", "notes.txt"]
    assert not store.use.is_on


def test_entries_of_another_identity_stay_when_the_cache_is_cleared(store, directory):
    """DC-4."""
    fill(store, page(1))
    store = reopened(store, directory, OTHER)
    fill(store, page(2))
    store.clear()
    store = reopened(store, directory)
    assert numbers(store) == [1]
    store.close()


@pytest.mark.parametrize("removes", [DiskStore.erase, DiskStore.clear])
def test_one_file_that_stays_keeps_no_other(store, directory, monkeypatch, caplog, removes):
    """DC-4: what can be forgotten is, and the log names the rest."""
    for number in range(PAGES):
        fill(store, page(number))
    kept, unlink = file_of(directory, page(7).key), os.unlink

    def fail_once(name: str, **where: int) -> None:
        if name == kept.name:
            raise OSError(errno.EPERM, "Operation not permitted", name)
        unlink(name, **where)

    monkeypatch.setattr(os, "unlink", fail_once)
    removes(store)
    assert sorted(os.listdir(directory / "slot-0")) == sorted([kept.name, "lock"])
    assert f"files cannot be removed: {kept.name}: Operation not permitted" in caplog.text
