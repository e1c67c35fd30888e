"""Entries of the store: what identifies one, where its bytes are, and the seal that guards its row in the index."""

from __future__ import annotations

import enum
import math
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import NamedTuple

from megatron_ext.prefix_cache.disk.data_file import Extent, pages_of
from megatron_ext.prefix_cache.hash_chain import HASH_BYTES, BlockHash, hash_blocks

Row = tuple[object, ...]

_SEAL_DOMAIN = b"mext.disk"
_SEAL_BYTES = 16
_NUMBERS = struct.Struct("<qqqqdd")
_EXTENT_BYTES = 8
_WORTH = 0.0  # in a column of the format; the time of use alone decides
MAX_TOKENS = 2**16  # of a block
MAX_DEPTH = 2**32  # blocks
MAX_BYTES = 2**40  # of an entry


class EntryKind(enum.IntEnum):
    """Kind of an entry."""

    BLOCK = 0  # keys and values of all attention layers
    SNAPSHOT = 1  # states of all recurrent layers at a block's end

    __hash__ = int.__hash__  # enumerations hash in Python code, at each look-up of a key


class EntryKey(NamedTuple):
    """Key of an entry: its kind, and the hash of its block, or of the block at whose end it was taken."""

    kind: EntryKind
    block_hash: BlockHash


@dataclass(frozen=True)
class NewEntry:
    """Entry as the cache describes it.

    Attributes:
        key: Kind and block hash.
        parent: Hash of the block before, or the root hash of the sequence.
        depth: Blocks from the start of the sequence, this one included.
        tokens: Token ids of the block.
        used: Time of its last use, seconds since the epoch; those used longest ago are evicted first.
    """

    key: EntryKey
    parent: BlockHash
    depth: int
    tokens: Sequence[int]
    used: float = 0.0

    @property
    def is_genuine(self) -> bool:
        """True if hashing the tokens after the parent yields the block hash."""
        return hash_blocks(self.parent, self.tokens, len(self.tokens)) == [self.key.block_hash]


@dataclass(frozen=True)
class StoredEntry:
    """Entry whose row is in the index.

    Attributes:
        row_id: Number of the row.
        identity: Identity of the model and all else that the bytes depend on.
        entry: Description by the cache.
        extents: Runs of pages that hold the bytes.
        size: Number of bytes.
        checksum: CRC-32 of the bytes.
    """

    row_id: int
    identity: bytes
    entry: NewEntry
    extents: tuple[Extent, ...]
    size: int
    checksum: int

    @property
    def order(self) -> tuple[float, int]:
        """Key of the order of eviction, smallest first: time of use, then the deeper one of a sequence."""
        return self.entry.used, -self.entry.depth

    def used_at(self, used: float) -> StoredEntry:
        """Return the same entry with another time of use."""
        return replace(self, entry=replace(self.entry, used=used))

    def to_row(self) -> Row:
        """Return the columns of the entry's row, without its number; the last one is the seal."""
        entry = self.entry
        tokens, extents = _packed(entry.tokens), _packed([number for extent in self.extents for number in extent])
        values = (
            *(self.identity, int(entry.key.kind), entry.key.block_hash, entry.parent, entry.depth),
            *(tokens, extents, self.size, self.checksum, _WORTH, entry.used),
        )
        return (*values, _seal(values))


def from_row(row_id: int, row: Sequence[object]) -> StoredEntry | None:
    """Return the entry of a row, with all its fields checked; None if the row was not written by `to_row`."""
    *values, seal = row
    if not _has_types(values) or seal != _seal(values):
        return None
    identity, kind, block_hash, parent, depth, tokens, extents, size, checksum, _, used = values
    assert isinstance(tokens, bytes), "types are checked"
    assert isinstance(extents, bytes), "types are checked"
    numbers = _unpacked(extents)
    pairs = tuple(map(Extent, numbers[::2], numbers[1::2]))
    key = EntryKey(EntryKind(kind), BlockHash(block_hash))  # type: ignore[arg-type]
    entry = NewEntry(key, BlockHash(parent), depth, _unpacked(tokens), used)  # type: ignore[arg-type]
    stored = StoredEntry(row_id, identity, entry, pairs, size, checksum)  # type: ignore[arg-type]
    return stored if _is_sound(stored) else None


def _has_types(values: Sequence[object]) -> bool:
    """Return whether a row has values of the right types and lengths."""
    types = (bytes, int, bytes, bytes, int, bytes, bytes, int, int, float, float)
    if len(values) != len(types) or any(type(value) is not kind for value, kind in zip(values, types, strict=True)):
        return False
    identity, kind, block_hash, parent, _, tokens, extents, *_ = values
    hashes = [len(one) == HASH_BYTES for one in (identity, block_hash, parent)]  # type: ignore[arg-type]
    return all(hashes) and kind in (0, 1) and len(tokens) % 4 == len(extents) % _EXTENT_BYTES == 0  # type: ignore[arg-type]


def _is_sound(stored: StoredEntry) -> bool:
    """Return whether the numbers of an entry are possible."""
    entry, pages = stored.entry, sum(extent.pages for extent in stored.extents)
    return (
        1 <= entry.depth <= MAX_DEPTH
        and 1 <= len(entry.tokens) <= MAX_TOKENS
        and 0 <= stored.size <= MAX_BYTES
        and 0 <= stored.checksum < 2**32
        and all(extent.pages > 0 for extent in stored.extents)
        and pages == pages_of(stored.size)
        and math.isfinite(entry.used)
    )


def _seal(values: Sequence[object]) -> bytes:
    """Return a digest over all other columns of a row, which notices every fault in them."""
    identity, kind, block_hash, parent, depth, tokens, extents, size, checksum, worth, used = values
    hasher = blake2b(digest_size=_SEAL_BYTES, person=_SEAL_DOMAIN)
    try:
        hasher.update(_NUMBERS.pack(kind, depth, size, checksum, worth, used))
    except (struct.error, OverflowError):  # numbers that no row of ours has
        return b""
    for field in (identity, block_hash, parent, tokens, extents):
        assert isinstance(field, bytes), "types are checked"
        hasher.update(len(field).to_bytes(8, "little"))
        hasher.update(field)
    return hasher.digest()


def _packed(numbers: Sequence[int]) -> bytes:
    """Return numbers below 2**32 as bytes, in the order of bytes of this machine, which an identity covers."""
    return array("I", numbers).tobytes()


def _unpacked(data: bytes) -> array[int]:
    return array("I", data)
