"""Entries of the store: what identifies one, and how a listing of the folder describes it."""

from __future__ import annotations

import enum
import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_ext.prefix_cache.hash_chain import BlockHash, hash_blocks

Buffer = bytes | bytearray | memoryview

PAGE_BYTES = 4096
CHECKSUM_BYTES = 4
TOKEN_BYTES = 4
_SUFFIXES = "kv", "states"  # by kind
_NAME = re.compile(r"([0-9a-f]{64})-([0-9a-f]{64})-([0-9a-f]{64})-([1-9]\d{0,9})-([1-9]\d{0,5})\.(kv|states)")


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
    """Entry as the name of its file, the file's size and the time of its last change describe it.

    Attributes:
        identity: Identity of the model and all else that the bytes depend on.
        key: See `NewEntry`, also the next three.
        parent: Hash of the block before.
        depth: Blocks from the start of the sequence.
        used: Time of its last use.
        token_count: Number of token ids.
        size: Bytes of the file.
    """

    identity: bytes
    key: EntryKey
    parent: BlockHash
    depth: int
    used: float
    token_count: int
    size: int

    @property
    def name(self) -> str:
        """Name of the file."""
        hashes = "-".join(one.hex() for one in (self.identity, self.key.block_hash, self.parent))
        return f"{hashes}-{self.depth}-{self.token_count}.{_SUFFIXES[self.key.kind]}"

    @property
    def head_bytes(self) -> int:
        """Bytes of the file before the bytes of the block or snapshot: checksum and token ids."""
        return CHECKSUM_BYTES + TOKEN_BYTES * self.token_count

    @property
    def pages(self) -> int:
        """Pages that the file takes; at least one, for what the file system keeps of each."""
        return max(1, -(-self.size // PAGE_BYTES))

    @property
    def order(self) -> tuple[float, int]:
        """Key of the order of eviction, smallest first: time of use, then the deeper one of a sequence."""
        return self.used, -self.depth

    def described(self, tokens: array[int]) -> NewEntry:
        """Return the description that the cache has given, with the tokens that the file has."""
        return NewEntry(self.key, self.parent, self.depth, tokens, self.used)


def from_file(name: str, used: float, size: int) -> StoredEntry | None:
    """Return the entry of a file; None if the name is not one of an entry's file."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    identity, block_hash, parent = map(bytes.fromhex, found.groups()[:3])
    key = EntryKey(EntryKind(_SUFFIXES.index(found[6])), BlockHash(block_hash))
    return StoredEntry(identity, key, BlockHash(parent), int(found[4]), used, int(found[5]), size)
