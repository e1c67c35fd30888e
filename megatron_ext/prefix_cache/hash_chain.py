"""Content keys of KV blocks: each covers its own tokens and, through its parent's block hash, everything before them.

BLAKE2b with 32-byte block hashes. Root and block hashes are made in different domains (BLAKE2's personalization), every
field of a root is preceded by its length, and a block's input has a fixed length, so no two layouts of fields can make
the same bytes. The whole block hash is the key: nothing is shortened, and a match is not verified again.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import NewType, cast

BlockHash = NewType("BlockHash", bytes)

HASH_BYTES = 32
_ROOT_DOMAIN = b"mext.root"
_BLOCK_DOMAIN = b"mext.block"
_TOKEN_TYPE = "I"  # token ids are below 2**32


def packed_tokens(tokens: Iterable[int]) -> array[int]:
    """Token ids as they are hashed; whoever keeps a sequence keeps these, so that no hash copies ids one by one."""
    return array(_TOKEN_TYPE, tokens)


def root_hash(fields: Iterable[bytes]) -> BlockHash:
    """The parent of a sequence's first block: everything beside the tokens that the KV depends on.

    Args:
        fields: For example model fingerprint, weights version, cache salt; their order and number matter.
    """
    hasher = blake2b(digest_size=HASH_BYTES, person=_ROOT_DOMAIN)
    for field in fields:
        hasher.update(len(field).to_bytes(8, "little"))
        hasher.update(field)
    return BlockHash(hasher.digest())


def hash_blocks(parent: BlockHash, tokens: Sequence[int], block_size: int) -> list[BlockHash]:
    """Block hashes of the complete blocks of `tokens`, the first of which follows the block of `parent`.

    Args:
        parent: Block hash of what comes before.
        tokens: Ids; read where they lie if they are packed (`packed_tokens`).
        block_size: Tokens.
    """
    packed = tokens if isinstance(tokens, array) and tokens.typecode == _TOKEN_TYPE else packed_tokens(tokens)
    return _hashes_of_blocks(parent, packed, 0, len(packed) // block_size, block_size)


def _hashes_of_blocks(parent: BlockHash, packed: array[int], first: int, last: int, block_size: int) -> list[BlockHash]:
    """Block hashes of the blocks [first, last) of a sequence, which follow the block of `parent`; one pass, no copy."""
    assert packed.itemsize == 4, "token ids are hashed as four bytes"
    if sys.byteorder == "big":
        packed, first, last = packed[first * block_size : last * block_size], 0, last - first
        packed.byteswap()
    stride, begun = block_size * packed.itemsize, _BEGUN.copy
    block_hashes: list[bytes] = []
    block_hash: bytes = parent
    with memoryview(packed) as tokens, tokens.cast("B") as data:
        for start in range(first * stride, last * stride, stride):
            hasher = begun()
            hasher.update(block_hash)
            hasher.update(data[start : start + stride])
            block_hash = hasher.digest()
            block_hashes.append(block_hash)
    return cast("list[BlockHash]", block_hashes)  # once: a call for each costs a tenth of its hashing


_BEGUN = blake2b(digest_size=HASH_BYTES, person=_BLOCK_DOMAIN)


class HashChain:
    """The block hashes of one sequence's complete blocks; grows with the sequence, computed once.

    Args:
        root: See `root_hash`.
        block_size: Tokens of a block.
    """

    def __init__(self, root: BlockHash, block_size: int) -> None:
        self.root = root
        self._block_size = block_size
        self._block_hashes: list[BlockHash] = []

    def __len__(self) -> int:
        return len(self._block_hashes)

    def extend(self, tokens: Sequence[int]) -> Sequence[BlockHash]:
        """Block hashes of the complete blocks of `tokens`, which begin with everything seen before.

        Only the blocks that were not complete before are hashed; without a copy if `tokens` are packed.
        """
        unhashed = self.unhashed(len(tokens))
        if unhashed:
            self._hash(tokens, unhashed)
        return self._block_hashes

    def extend_by(self, tokens: Sequence[int], most: int) -> None:
        """The same for at most so many tokens more, but for a block at least."""
        self._hash(tokens, min(self.unhashed(len(tokens)), max(most, self._block_size)))

    def _hash(self, tokens: Sequence[int], count: int) -> None:
        """The complete blocks among the next `count` tokens."""
        known, size = len(self._block_hashes), self._block_size
        parent = self._block_hashes[-1] if self._block_hashes else self.root
        if isinstance(tokens, array) and tokens.typecode == _TOKEN_TYPE:
            self._block_hashes += _hashes_of_blocks(parent, tokens, known, known + count // size, size)
        else:
            self._block_hashes += hash_blocks(parent, tokens[known * size : known * size + count], size)

    def unhashed(self, length: int) -> int:
        """Tokens in the complete blocks of a sequence of `length` that have not been hashed yet."""
        return max(0, length // self._block_size - len(self._block_hashes)) * self._block_size
