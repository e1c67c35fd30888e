"""Entries whose bytes follow from their keys, and random lives of a store with them; standard library only."""

from __future__ import annotations

import contextlib
import os
import random
import tempfile
from collections.abc import Callable
from hashlib import shake_128
from pathlib import Path

from megatron_ext.prefix_cache.disk.entry import EntryKey, EntryKind, NewEntry, StoredEntry, from_file
from megatron_ext.prefix_cache.disk.store import DiskStore
from megatron_ext.prefix_cache.disk.store_use import BAD_BYTES, BAD_TOKENS, TOO_SHORT
from megatron_ext.prefix_cache.hash_chain import BlockHash, hash_blocks, root_hash

IDENTITY = bytes(range(32))
LIMIT = 2**20  # bytes
BLOCK = 4  # tokens
FAULTS = {BAD_BYTES, BAD_TOKENS, TOO_SHORT}
ROOT = root_hash([b"lives"])


def content(key: EntryKey) -> bytes:
    """The bytes of an entry: of another length for each key, and random."""
    size = 1 + int.from_bytes(key.block_hash[:2], "little") % (60_000 if key.kind is EntryKind.SNAPSHOT else 20_000)
    return shake_128(bytes([key.kind]) + key.block_hash).digest(size)


def entry_after(
    parent: NewEntry | None, tokens: list[int], kind: EntryKind = EntryKind.BLOCK, used: float = 0.0
) -> NewEntry:
    """The entry of the block of these tokens after that of `parent`, or at the start of a sequence."""
    before: BlockHash = ROOT if parent is None else parent.key.block_hash
    (block_hash,) = hash_blocks(before, tokens, len(tokens))
    depth = 1 if parent is None else parent.depth + 1
    return NewEntry(EntryKey(kind, block_hash), before, depth, tokens, used)


def put(store: DiskStore, entry: NewEntry) -> bool:
    """Store an entry, in two buffers."""
    data = content(entry.key)
    return store.put(entry, [data[: len(data) // 3], memoryview(data)[len(data) // 3 :]])


def is_read(store: DiskStore, key: EntryKey) -> bool:
    """Return whether an entry can be read; what is read must be right."""
    into = bytearray(len(content(key)))
    found = store.read(key, [memoryview(into)[:7], memoryview(into)[7:]]) is not None
    assert not found or into == content(key), f"wrong bytes for {key}"
    return found


def faults(store: DiskStore) -> dict[str, int]:
    """Entries that were dropped since they were damaged, by reason."""
    return {reason: count for reason, count in store.drops.items() if reason in FAULTS}


def stored_in(slot: Path) -> list[StoredEntry]:
    """The entries of all files of a slot, which another process may be writing."""
    found = []
    for path in slot.iterdir():
        with contextlib.suppress(FileNotFoundError):  # renamed or removed since it was listed
            found.append(from_file(path.name, (status := path.stat()).st_mtime, status.st_size))
    return [entry for entry in found if entry is not None]


def file_of(directory: Path, key: EntryKey) -> Path:
    """The file of an entry."""
    (path,) = directory.glob(f"slot-*/*-{key.block_hash.hex()}-*.{('kv', 'states')[key.kind]}")
    return path


def damage(path: Path) -> None:
    """Flip the last byte of an entry's file, whose time of last use stays."""
    status, data = path.stat(), path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 255]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def fast_directory() -> tempfile.TemporaryDirectory[str]:
    """A directory in memory where there is one: campaigns sync thousands of times."""
    return tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)


def live(store: DiskStore, seed: int, actions: int, after_each: Callable[[], None] = lambda: None) -> None:
    """Put, read, touch, forget and commit at random."""
    rng = random.Random(seed)
    known: list[NewEntry] = []
    for step in range(actions):
        action = rng.random()
        if action < 0.5 or not known:
            parent = rng.choice(known) if known and rng.random() < 0.8 else None
            kind = rng.choice(list(EntryKind))
            entry = entry_after(parent, [rng.randrange(2**32) for _ in range(BLOCK)], kind, used=step * rng.random())
            if put(store, entry):
                known.append(entry)
        elif action < 0.65:
            is_read(store, rng.choice(known).key)
        elif action < 0.75:
            store.touch(rng.choice(known).key, step * rng.random())
        elif action < 0.85:
            store.forget([rng.choice(known).key])
        elif action < 0.99:
            store.commit()
        else:
            store.clear()
        after_each()


def files_of(directory: Path) -> dict[str, bytes]:
    """The contents of a directory's files, by their relative paths."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def write_files(directory: Path, files: dict[str, bytes]) -> None:
    """Make a directory with these files, for this user alone."""
    for name, data in files.items():
        path = directory / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.write_bytes(data)
