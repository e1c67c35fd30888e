"""Index of the store's entries: a table of sealed rows in SQLite, opened as a file that a stranger may have written.

No row is trusted: the schema must be ours to the letter, and each row carries a seal over its columns. The file is
locked for as long as it is open, so no other process reads or writes it, and no shared memory is mapped.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ext.prefix_cache.disk.entry import EntryKey, StoredEntry, from_row
from megatron_ext.prefix_cache.disk.store_use import BAD_ROW, TOO_SHORT

FORMAT = 1  # of marker, index and data file; a newer one is refused
APPLICATION_ID = 0x4D455843  # "MEXC", in the header of the file
MAX_ROW_ID = 2**62
MAX_WAL_BYTES = 8 * 1024**2
WAL_SUFFIX = "-wal"
SUFFIXES = ("", WAL_SUFFIX, "-shm", "-journal")  # of the files that SQLite may make

_SCHEMA = (
    "CREATE TABLE entries (id INTEGER PRIMARY KEY, identity BLOB, kind INTEGER, hash BLOB, parent BLOB, "
    "depth INTEGER, tokens BLOB, extents BLOB, size INTEGER, checksum INTEGER, worth REAL, used REAL, seal BLOB)"
)
_COLUMNS = "identity, kind, hash, parent, depth, tokens, extents, size, checksum, worth, used, seal"
_INSERT = f"INSERT INTO entries (id, {_COLUMNS}) VALUES ({', '.join('?' * 13)})"
_USE = "UPDATE entries SET worth = ?, used = ?, seal = ? WHERE id = ?"
_SETTINGS = (  # the first ones before anything is read of the schema
    "trusted_schema = OFF",
    "cell_size_check = ON",
    "secure_delete = ON",  # rows have token ids
    "mmap_size = 0",
    "temp_store = MEMORY",
    "locking_mode = EXCLUSIVE",
    "journal_mode = WAL",
    "synchronous = FULL",
    "wal_autocheckpoint = 0",
)
_LIMITS = {
    "SQLITE_LIMIT_LENGTH": 8 * 1024**2,
    "SQLITE_LIMIT_SQL_LENGTH": 4096,
    "SQLITE_LIMIT_COLUMN": 16,
    "SQLITE_LIMIT_EXPR_DEPTH": 16,
    "SQLITE_LIMIT_COMPOUND_SELECT": 1,
    "SQLITE_LIMIT_ATTACHED": 0,
    "SQLITE_LIMIT_TRIGGER_DEPTH": 1,
    "SQLITE_LIMIT_WORKER_THREADS": 0,
}


class NewerFormatError(Exception):
    """Index of a later version of the package. The message is the version of its format."""


class DiskIndex:
    """Open index.

    Args:
        path: File of the index, which exists; an empty one becomes an index.
        may_be_new: Whether the index may be empty; otherwise an empty one is damaged.

    Raises:
        NewerFormatError: The file has a later format.
        sqlite3.DatabaseError: The file is damaged, or not an index of ours.
        sqlite3.OperationalError: The file cannot be read, locked or written.
    """

    def __init__(self, path: Path, *, may_be_new: bool = True) -> None:
        self._path, self._may_be_new = path, may_be_new
        self._connection = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
        try:
            self._prepare()
        except BaseException:
            self._connection.close()
            raise

    def _prepare(self) -> None:
        connection = self._connection
        connection.text_factory = bytes
        if hasattr(connection, "setlimit"):  # from Python 3.11 on
            for name, limit in _LIMITS.items():
                connection.setlimit(getattr(sqlite3, name), limit)
        if hasattr(connection, "setconfig"):  # from Python 3.12 on
            connection.setconfig(getattr(sqlite3, "SQLITE_DBCONFIG_DEFENSIVE"), True)  # noqa: B009
        for setting in _SETTINGS:
            connection.execute(f"PRAGMA {setting}").fetchall()
        schema = [sql for (sql,) in connection.execute("SELECT sql FROM sqlite_master LIMIT 2")]
        application, version = self._number("application_id"), self._number("user_version")
        if application == APPLICATION_ID and version > FORMAT:
            raise NewerFormatError(str(version))
        if not schema and (application, version) == (0, 0):
            if not self._may_be_new:
                raise sqlite3.DatabaseError("it is empty, and the data file is not")
            self._create()
        elif schema != [_SCHEMA.encode()] or (application, version) != (APPLICATION_ID, FORMAT):
            raise sqlite3.DatabaseError("its schema differs from an index's")
        elif connection.execute("PRAGMA quick_check(1)").fetchall() != [(b"ok",)]:
            raise sqlite3.DatabaseError("its structure is damaged")

    def _number(self, name: str) -> int:
        return int(self._connection.execute(f"PRAGMA {name}").fetchone()[0])

    def _create(self) -> None:
        statements = (_SCHEMA, f"PRAGMA application_id = {APPLICATION_ID}", f"PRAGMA user_version = {FORMAT}")
        self._transact([(statement, [()]) for statement in statements])

    def load(self) -> tuple[list[StoredEntry], list[int]]:
        """Return all entries whose rows are sound, in order of their numbers, and the numbers of the other rows."""
        sound: list[StoredEntry] = []
        unsound: list[int] = []
        for row_id, *row in self._connection.execute(f"SELECT id, {_COLUMNS} FROM entries ORDER BY id"):
            entry = from_row(row_id, row) if 0 < row_id < MAX_ROW_ID else None
            if entry is None:
                unsound.append(row_id)
            else:
                sound.append(entry)
        return sound, unsound

    def apply(
        self, removed: Iterable[int] = (), added: Iterable[StoredEntry] = (), used: Iterable[StoredEntry] = ()
    ) -> None:
        """Change rows in one transaction, which is on the medium when this returns.

        Args:
            removed: Numbers of rows to remove.
            added: Entries to add.
            used: Entries with another time of use.
        """
        deletes = [(row_id,) for row_id in removed]
        inserts = [(entry.row_id, *entry.to_row()) for entry in added]
        updates = [(*entry.to_row()[-3:], entry.row_id) for entry in used]
        changes: list[tuple[str, Sequence[tuple[object, ...]]]] = [
            ("DELETE FROM entries WHERE id = ?", deletes),
            (_INSERT, inserts),
            (_USE, updates),
        ]
        self._transact([change for change in changes if change[1]])

    def _transact(self, changes: Iterable[tuple[str, Sequence[tuple[object, ...]]]]) -> None:
        connection = self._connection
        connection.execute("BEGIN IMMEDIATE")
        try:
            for statement, rows in changes:
                if rows == [()]:
                    connection.execute(statement)
                elif connection.executemany(statement, rows).rowcount != len(rows):
                    raise sqlite3.DatabaseError("rows are missing")
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        if self.wal_bytes > MAX_WAL_BYTES:
            self.checkpoint()

    @property
    def wal_bytes(self) -> int:
        """Size of the write-ahead log."""
        log = self._path.with_name(self._path.name + WAL_SUFFIX)
        return log.stat().st_size if log.exists() else 0

    def checkpoint(self) -> None:
        """Move all transactions from the write-ahead log to the index proper, and empty the log."""
        self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def close(self) -> None:
        """Close the index; its log is removed."""
        self._connection.close()


@dataclass(frozen=True)
class IndexScan:
    """Rows of an index.

    Attributes:
        kept: Entries of the rows that can be used: no two have a page or, within an identity, a key in common.
        dropped: Numbers of the other rows, each with the reason.
    """

    kept: list[StoredEntry]
    dropped: dict[int, str]


def scan_index(index: DiskIndex, file_pages: int) -> IndexScan:
    """Read all rows of an index.

    Args:
        index: The index.
        file_pages: Pages that the data file has.
    """
    sound, unsound = index.load()
    dropped = dict.fromkeys(unsound, BAD_ROW)
    shared = _taken_twice(sound)
    kept: list[StoredEntry] = []
    keys: set[tuple[bytes, EntryKey]] = set()
    for entry in sound:
        key, end = (entry.identity, entry.entry.key), max(extent.end for extent in entry.extents)
        if entry.row_id in shared or key in keys:
            dropped[entry.row_id] = BAD_ROW
        elif end > file_pages:
            dropped[entry.row_id] = TOO_SHORT
        else:
            keys.add(key)
            kept.append(entry)
    return IndexScan(kept, dropped)


def _taken_twice(entries: Iterable[StoredEntry]) -> Collection[int]:
    """Return the numbers of the rows whose pages belong to another row, too."""
    ordered = sorted((extent, entry.row_id) for entry in entries for extent in entry.extents)
    found: set[int] = set()
    end, owner = 0, 0
    for extent, row_id in ordered:
        if extent.start < end:
            found |= {owner, row_id}
        if extent.end > end:
            end, owner = extent.end, row_id
    return found
