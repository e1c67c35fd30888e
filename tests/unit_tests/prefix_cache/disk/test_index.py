"""Index of the store as a file that a stranger may have written: seals, schema, and format."""

from __future__ import annotations

import sqlite3
import struct
from pathlib import Path

import pytest

from megatron_ext.errors import ConfigError
from megatron_ext.prefix_cache.disk.data_file import Extent
from megatron_ext.prefix_cache.disk.entry import NewEntry, StoredEntry, from_row
from megatron_ext.prefix_cache.disk.index import DiskIndex
from megatron_ext.prefix_cache.disk.store import open_directory_store
from tests.unit_tests.prefix_cache.disk.lives import IDENTITY, LIMIT, entry_after, faults, put


def stored(number: int, *extents: Extent) -> StoredEntry:
    entry = entry_after(None, [number], used=3.0)
    size = 4096 * sum(extent.pages for extent in extents) - 5
    return StoredEntry(number, IDENTITY, entry, extents, size, 12345)


def test_a_row_is_read_as_it_was_written():
    entry = stored(1, Extent(3, 2), Extent(9, 1))
    found = from_row(1, entry.to_row())
    assert found is not None
    assert found.used_at(3.0).to_row() == entry.to_row()
    assert (found.extents, found.size, found.checksum) == (entry.extents, entry.size, entry.checksum)


def changed(value: object) -> list[object]:
    """Other values for a column, also of other types."""
    others: list[object] = [None, "text", b"", 2**40, -1, float("nan"), float("inf")]
    if isinstance(value, bytes):
        return [*others, bytes([value[0] ^ 1]) + value[1:], value + value]
    assert isinstance(value, int | float)
    return [*others, value + 1]


@pytest.mark.parametrize("column", range(12))
def test_a_change_of_any_column_is_noticed(column):
    """DC-3."""
    row = stored(1, Extent(3, 2)).to_row()
    assert from_row(1, row) is not None
    for other in changed(row[column]):
        assert from_row(1, (*row[:column], other, *row[column + 1 :])) is None, other


@pytest.mark.parametrize(
    "numbers",
    [
        {"size": -1},
        {"size": 0},
        {"size": 4096 * 2 + 1},
        {"size": 4096},
        {"checksum": 2**32},
        {"extents": (Extent(3, 0), Extent(3, 2))},
    ],
    ids=str,
)
def test_impossible_numbers_are_refused_even_with_a_seal(numbers):
    """DC-3."""
    entry = stored(1, Extent(3, 2))
    assert from_row(1, StoredEntry(**(vars(entry) | numbers)).to_row()) is None


@pytest.mark.parametrize("used", [float("nan"), float("inf")])
def test_no_time_that_is_not_a_number(used):
    """DC-3."""
    assert from_row(1, stored(1, Extent(3, 2)).used_at(used).to_row()) is None


def test_pages_and_keys_that_occur_twice_are_dropped(tmp_path):
    """DC-3: rows that contradict each other are sound one by one."""
    store = open_directory_store(tmp_path / "cache", IDENTITY, LIMIT)
    put(store, entry_after(None, [1, 2, 3, 4], used=9.0))
    store.close()
    index = DiskIndex(tmp_path / "cache" / "slot-0" / "index.sqlite")
    first, second, third = stored(20, Extent(6, 4)), stored(21, Extent(7, 1)), stored(24, Extent(9, 1))
    again = StoredEntry(**(vars(stored(22, Extent(12, 1))) | {"row_id": 23, "extents": (Extent(13, 1),)}))
    index.apply(added=[first, second, third, stored(22, Extent(12, 1)), again])
    index.close()
    store = open_directory_store(tmp_path / "cache", IDENTITY, LIMIT)
    assert faults(store) == {"row": 4}, "a run may contain several others"
    assert sorted(entry.row_id for entry in store.entries()) == [1, 22]
    store.check()
    store.close()
    store = open_directory_store(tmp_path / "cache", IDENTITY, LIMIT)
    assert faults(store) == {}, "they are off the medium"
    store.close()


def statements(path: Path, *sql: str) -> None:
    connection = sqlite3.connect(path, isolation_level=None)
    for statement in sql:
        connection.execute(statement)
    connection.close()


@pytest.mark.parametrize(
    "sql",
    [
        "CREATE VIEW v AS SELECT 1",
        "CREATE TRIGGER t AFTER INSERT ON entries BEGIN DELETE FROM entries; END",
        "CREATE INDEX i ON entries (hash)",
        "CREATE TABLE other (x)",
        "ALTER TABLE entries ADD COLUMN y",
        "DROP TABLE entries",
        "PRAGMA application_id = 1",
        "PRAGMA user_version = 0",
    ],
)
def test_another_schema_is_not_used(tmp_path, sql):
    """DC-3."""
    store = open_directory_store(tmp_path / "cache", IDENTITY, LIMIT)
    put(store, entry_after(None, [1]))
    store.close()
    statements(tmp_path / "cache" / "slot-0" / "index.sqlite", sql)
    store = open_directory_store(tmp_path / "cache", IDENTITY, LIMIT)
    assert faults(store) == {"index": 1}
    assert len(store) == 0
    assert put(store, entry_after(None, [1]))
    store.close()


def test_an_index_of_a_newer_format_is_refused_and_kept(tmp_path):
    """DC-2."""
    open_directory_store(tmp_path / "cache", IDENTITY, LIMIT).close()
    path = tmp_path / "cache" / "slot-0" / "index.sqlite"
    statements(path, "PRAGMA user_version = 2", "CREATE TABLE new (x)")
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=f"{path} has format 2 of a later version"):
        open_directory_store(tmp_path / "cache", IDENTITY, LIMIT)
    assert path.read_bytes() == before


def test_rows_that_are_missing_undo_the_transaction(tmp_path):
    path = tmp_path / "index.sqlite"
    path.touch()
    index = DiskIndex(path)
    index.apply(added=[stored(1, Extent(0, 1))])
    with pytest.raises(sqlite3.DatabaseError, match="rows are missing"):
        index.apply(removed=[1, 7])
    assert [entry.row_id for entry in index.load()[0]] == [1]
    index.close()


def test_the_log_does_not_grow_without_end(tmp_path):
    path = tmp_path / "index.sqlite"
    path.touch()
    index = DiskIndex(path)
    largest = 0
    tokens = list(range(2**15))
    for number in range(1, 120):
        entry = NewEntry(entry_after(None, [number]).key, entry_after(None, [0]).key.block_hash, 1, tokens)
        row = StoredEntry(number, IDENTITY, entry, (Extent(number, 1),), 4096, 0)
        index.apply(added=[row])
        largest = max(largest, index.wal_bytes)
    assert 4 * 1024**2 < largest < 9 * 1024**2
    index.close()
    assert struct.unpack(">I", path.read_bytes()[68:72]) == (0x4D455843,)


def test_the_index_is_opened_with_limits(tmp_path):
    """DC-3: a file that a stranger has written can neither load code nor make statements of any size."""
    path = tmp_path / "index.sqlite"
    path.touch()
    index = DiskIndex(path)
    connection = index._connection
    assert connection.execute("PRAGMA trusted_schema").fetchone() == (0,)
    assert connection.getlimit(sqlite3.SQLITE_LIMIT_LENGTH) == 8 * 1024**2
    assert connection.getlimit(sqlite3.SQLITE_LIMIT_ATTACHED) == 0
    with pytest.raises(sqlite3.OperationalError):
        connection.execute("ATTACH DATABASE ':memory:' AS other")
    with pytest.raises(sqlite3.OperationalError, match="not authorized"):
        connection.execute("SELECT load_extension('x')")
    index.close()
