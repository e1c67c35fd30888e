"""Budget, order of eviction, identities and failures of the store of cache entries on disk."""

from __future__ import annotations

import logging
import os
import resource
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from megatron_ext.prefix_cache.disk.data_file import PAGE_BYTES
from megatron_ext.prefix_cache.disk.entry import EntryKind, NewEntry, StoredEntry
from megatron_ext.prefix_cache.disk.store import DiskStore, open_directory_store
from tests.unit_tests.prefix_cache.disk.lives import IDENTITY, LIMIT, entry_after, faults, is_read, put

OTHER = bytes(32)
PAGES = 16


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
    return store.put(entry, [bytes([entry.tokens[0]]) * PAGE_BYTES])


def numbers(store: DiskStore) -> list[int]:
    """The numbers of the entries, those used last first."""
    return [entry.entry.tokens[0] for entry in store.entries()]


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
    assert (found.entry.parent, found.entry.depth) == (first.key.block_hash, 2)
    assert (found.entry.used, list(found.entry.tokens)) == (9.0, [3, 4])
    use = store.use
    assert (use.blocks, use.snapshots, use.written, use.read) == (1, 1, 0, 2)
    store.close()


def test_what_was_used_longest_ago_goes_first(store):
    for number in range(PAGES):
        assert fill(store, page(number, used=float(-number)))
    assert fill(store, page(100, used=5.0))
    assert fill(store, page(101, used=5.0))
    assert set(range(PAGES)) - set(numbers(store)) == {PAGES - 1, PAGES - 2}
    store.check()


def test_what_was_used_longer_ago_than_all_is_not_taken(store):
    for number in range(PAGES):
        assert fill(store, page(number, used=1.0))
    assert not fill(store, page(100, used=0.5))
    assert store.use.drops == {"less_worth": 1}
    assert len(store) == PAGES
    assert not store.put(page(101, used=9.0), [bytes(PAGES * PAGE_BYTES + 1)])
    assert len(store) == PAGES
    assert fill(store, page(102, used=1.0))
    store.check()


def test_pages_of_what_was_removed_are_used_first(store):
    """An entry would be evicted for nothing, or one that has room be refused."""
    for number in range(PAGES):
        assert fill(store, page(number, used=1.0))
    store.remove(page(3).key)
    assert fill(store, page(100, used=0.5))
    assert (len(store), store.use.drops) == (PAGES, {})
    store.check()


def test_what_is_written_is_committed_after_some_bytes(store, directory, monkeypatch):
    """DC-1: a crash loses no more; each commit waits for the device, so that it comes not after each entry."""
    monkeypatch.setattr("megatron_ext.prefix_cache.disk.store.PENDING_BYTES", 3 * PAGE_BYTES)
    commits = []
    apply = store._index.apply
    monkeypatch.setattr(store._index, "apply", lambda *rows: (commits.append(len(store)), apply(*rows)))
    for number in range(7):
        fill(store, page(number))
    assert commits == [3, 6]
    store.touch(page(0).key, 5.0)
    for _ in range(2):
        store.commit()
    assert commits == [3, 6, 7], "nothing has changed since"


def test_an_entry_that_was_used_and_is_removed_leaves_no_row(store):
    """DC-3: a commit of its use would find no row, which ends the use of the store."""
    for number in range(2):
        fill(store, page(number))
    store.touch(page(0).key, 4.0)
    store.commit()
    for number in range(2):
        store.touch(page(number).key, 5.0)
    store.remove(page(0).key)
    store.commit()
    store.remove(page(1).key)
    store.commit()
    assert store.use.is_on


class Seen:
    """Observer of a store."""

    def __init__(self) -> None:
        self.keys: set[object] = set()

    def on_stored(self, stored: StoredEntry) -> None:
        self.keys.add(stored.entry.key)

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
    assert seen.keys == {one.key for one in entries if one.key in store}
    assert len(seen.keys) == PAGES
    end(store)
    assert (seen.keys, store.use.blocks, store.use.bytes) == (set(), 0, 0)


def test_a_part_of_the_budget_is_freed_at_once(store, monkeypatch):
    """Each eviction is committed before its pages are used, and waits for the device."""
    monkeypatch.setattr("megatron_ext.prefix_cache.disk.store.EVICTION_SHARE", 4)
    for number in range(PAGES + 1):
        assert fill(store, page(number, used=float(number)))
    assert numbers(store) == list(range(PAGES, 3, -1))


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


def test_within_a_sequence_the_deeper_entry_goes_first(store):
    chain = [page(0)]
    for number in range(1, PAGES):
        chain.append(entry_after(chain[-1], [number]))
    for entry in chain:
        assert fill(store, entry)
    assert numbers(store) == list(range(PAGES))
    assert fill(store, page(99, used=1.0))
    assert numbers(store) == [99, *range(PAGES - 1)]


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


def is_read_page(store: DiskStore, number: int) -> bool:
    into = bytearray(PAGE_BYTES)
    return store.read(page(number).key, [into]) and into == bytes([number]) * PAGE_BYTES


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


def test_a_smaller_budget_cuts_the_file(store, directory):
    for number in range(PAGES):
        assert fill(store, page(number))
    store = reopened(store, directory, pages=4)
    assert (directory / "slot-0" / "data").stat().st_size == 4 * PAGE_BYTES
    assert len(store) == 4
    assert store.use.drops == {"evicted": PAGES - 4}
    assert all(is_read_page(store, number) for number in numbers(store))
    store.check()
    store.close()


def test_a_smaller_budget_keeps_what_was_used_last(store, directory):
    """DC-1: wherever its bytes are, and one entry takes several runs of pages; damaged ones are misses."""
    for number in range(PAGES - 4):
        assert fill(store, page(number, used=float(number)))
    for number in (1, 3):
        store.remove(page(number).key)
    store.commit()
    large = page(99, used=50.0)
    assert store.put(large, [bytes([99]) * 4 * PAGE_BYTES])
    assert len(store.find(large.key).extents) > 1
    raw = directory / "slot-0" / "data"
    damaged = store.find(page(11).key).extents[0].start * PAGE_BYTES
    store.close()
    raw.write_bytes(raw.read_bytes()[:damaged] + b"?" + raw.read_bytes()[damaged + 1 :])
    for _ in range(2):
        store = open_directory_store(directory, IDENTITY, 8 * PAGE_BYTES)
        assert numbers(store) == [99, 10, 9, 8]
        store.check()
        assert raw.stat().st_size <= 8 * PAGE_BYTES
        assert all(is_read_page(store, number) for number in (8, 9, 10))
        into = bytearray(4 * PAGE_BYTES)
        assert store.read(large.key, [into])
        assert into == bytes([99]) * 4 * PAGE_BYTES
        store.close()
    assert store.use.drops == {}


def test_an_entry_moves_only_to_pages_that_hold_nothing(store, directory):
    """DC-3: not to its own, which a crash would leave half written."""
    assert store.put(page(1, used=1.0), [bytes([1]) * 3 * PAGE_BYTES])
    assert store.put(page(2, used=2.0), [bytes([2]) * 4 * PAGE_BYTES])
    store = reopened(store, directory, pages=5)
    assert numbers(store) == []
    store.check()
    store.close()


def test_tokens_are_compared(store):
    entry = page(7)
    fill(store, entry)
    assert store.read(entry.key, [bytearray(PAGE_BYTES)], [7])
    assert not store.read(entry.key, [bytearray(PAGE_BYTES)], [8])
    assert store.use.drops == {"tokens": 1}


def test_cleared_entries_are_gone_at_once(store, directory):
    """DC-4: nothing has to follow `clear` for the entries to be gone from the medium."""
    fill(store, page(1))
    store.commit()
    store.clear()
    index = directory / "slot-0" / "index.sqlite"
    copy = directory / "slot-1"
    copy.mkdir(mode=0o700)
    for path in index.parent.glob("index.sqlite*"):
        (copy / path.name).write_bytes(path.read_bytes())
    other = open_directory_store(directory, IDENTITY, PAGES * PAGE_BYTES)
    assert (other.use.blocks, other.drops) == (0, {})
    other.close()


def test_nothing_of_cleared_entries_is_left_in_the_files(store, directory):
    """DC-4: neither token ids nor bytes, unless entries of another identity are there; the store goes on."""
    entry = entry_after(None, [0x5A17C0DE])
    put(store, entry)
    store = reopened(store, directory, OTHER)
    fill(store, page(2))
    store.clear()
    data, index = directory / "slot-0" / "data", (directory / "slot-0").glob
    assert data.stat().st_size
    store = reopened(store, directory)
    assert [one.entry.key for one in store.entries()] == [entry.key]
    store.clear()
    tokens = array("I", entry.tokens).tobytes()
    assert not any(tokens in path.read_bytes() for path in index("index*"))
    assert not data.stat().st_size
    store.check()
    assert fill(store, page(3))
    store = reopened(store, directory)
    assert numbers(store) == [3]
    assert is_read_page(store, 3)
    store.close()


def test_a_damaged_index_begins_empty_and_says_so(store, directory, caplog):
    """DC-3."""
    fill(store, page(1))
    store.close()
    index = directory / "slot-0" / "index.sqlite"
    index.write_bytes(b"garbage" * 1000)
    with caplog.at_level(logging.WARNING):
        store = open_directory_store(directory, IDENTITY, PAGES * PAGE_BYTES)
    assert len(caplog.records) == 1
    assert faults(store) == {"index": 1}
    assert fill(store, page(1))
    assert is_read_page(store, 1)
    store.close()


@pytest.mark.parametrize("rest", [b"", None])
def test_an_index_that_is_cut_to_nothing_is_counted(store, directory, caplog, rest):
    """DC-3: it looks like a new one."""
    fill(store, page(1))
    store.close()
    index = directory / "slot-0" / "index.sqlite"
    index.unlink() if rest is None else index.write_bytes(rest)
    with caplog.at_level(logging.WARNING):
        store = open_directory_store(directory, IDENTITY, PAGES * PAGE_BYTES)
    assert "the index cannot be used" in caplog.text
    assert faults(store) == {"index": 1}
    store = reopened(store, directory)
    assert faults(store) == {}
    store.close()


@pytest.mark.parametrize("name", ["data", "index.sqlite"])
def test_a_file_that_vanishes_ends_the_use_of_the_store(store, directory, caplog, name):
    """DC-3: one line, and no error for the caller."""
    assert fill(store, page(1))
    (directory / "slot-0" / name).unlink()
    with caplog.at_level(logging.WARNING):
        store.commit()
        assert not fill(store, page(2))
        store.commit()
    assert [name in record.getMessage() for record in caplog.records] == [True]
    assert not store.use.is_on
    assert (len(store), store.entries(), store.find(page(1).key)) == (0, [], None)
    store.clear()
    assert not list(directory.glob("slot-0/index*"))


def test_no_room_on_the_device_ends_the_use_of_the_store(directory, caplog):
    """DC-3: a limit on the size of files stands for a full device."""
    store = open_directory_store(directory, IDENTITY, LIMIT)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT // 4, before[1]))
        with caplog.at_level(logging.WARNING):
            stored = [store.put(page(number), [bytes(LIMIT // 8)]) for number in range(4)]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert stored == [True, True, False, False]
    assert len(caplog.records) == 1
    assert not store.use.is_on
    store.close()
    store = open_directory_store(directory, IDENTITY, LIMIT)
    assert store.use.is_on
    store.close()


def test_files_are_this_users_alone(store, directory):
    fill(store, page(1))
    store.commit()
    modes = {path.name: path.stat().st_mode & 0o777 for path in directory.rglob("*")}
    assert modes.pop("slot-0") == 0o700
    assert modes.keys() == {"prefix_cache_marker", "lock", "data", "index.sqlite", "index.sqlite-wal"}
    assert set(modes.values()) == {0o600}
    assert directory.stat().st_mode & 0o777 == 0o700


def test_erase_removes_the_files_of_the_slot_alone(store, directory):
    """DC-4."""
    foreign = directory / "slot-0" / "notes.txt"
    foreign.write_text("mine")
    fill(store, page(1))
    store.erase()
    assert sorted(os.listdir(directory / "slot-0")) == ["lock", "notes.txt"]
    assert not store.use.is_on
