"""Block hashes: content keys of KV blocks, each over its own tokens and, through its parent's hash, all before them.

BLAKE2b with 32-byte hashes. Root and block hashes are in different domains (BLAKE2's personalization), every field of a
root is preceded by its length, and a block's input has a fixed length, so no two layouts of fields can give the same
bytes. The whole block hash is the key: it is not shortened, and a match is not verified again.
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
    """Return token ids in the form that is hashed; a sequence kept in this form is hashed without a copy."""
    return array(_TOKEN_TYPE, tokens)


def root_hash(fields: Iterable[bytes]) -> BlockHash:
    """Return the parent hash of a sequence's first block: all that the KV depends on except the tokens.

    Args:
        fields: Model fingerprint, weights version, cache salt and the like; their order and number matter.
    """
    hasher = blake2b(digest_size=HASH_BYTES, person=_ROOT_DOMAIN)
    for field in fields:
        hasher.update(len(field).to_bytes(8, "little"))
        hasher.update(field)
    return BlockHash(hasher.digest())


def hash_blocks(parent: BlockHash, tokens: Sequence[int], block_size: int) -> list[BlockHash]:
    """Return the block hashes of the complete blocks of `tokens`, the first of which continues `parent`.

    Args:
        parent: Block hash of the previous block, or a root hash.
        tokens: Token ids; not copied if they are packed (`packed_tokens`).
        block_size: Tokens of a block.
    """
    packed = tokens if isinstance(tokens, array) and tokens.typecode == _TOKEN_TYPE else packed_tokens(tokens)
    return _hashes_of_blocks(parent, packed, 0, len(packed) // block_size, block_size)


def _hashes_of_blocks(parent: BlockHash, packed: array[int], first: int, last: int, block_size: int) -> list[BlockHash]:
    """Return the hashes of the blocks [first, last) of a sequence, which continue `parent`; one pass, no copy."""
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
    """Block hashes of one sequence's complete blocks; grows with the sequence, each computed once.

    Args:
        root: Root hash of the sequence; see `root_hash`.
        block_size: Tokens of a block.
    """

    def __init__(self, root: BlockHash, block_size: int) -> None:
        self.root = root
        self._block_size = block_size
        self._block_hashes: list[BlockHash] = []

    def fork(self, tokens: int) -> HashChain:
        """Return the chain of another sequence with the same first tokens: it has the hashes of their blocks."""
        other = HashChain(self.root, self._block_size)
        other._block_hashes = self._block_hashes[: tokens // self._block_size]
        return other

    def cut(self, tokens: int) -> None:
        """Forget the hashes of blocks that the first `tokens` tokens do not complete."""
        del self._block_hashes[tokens // self._block_size :]

    def extend(self, tokens: array[int]) -> Sequence[BlockHash]:
        """Return the block hashes of the complete blocks of packed `tokens`, which begin with all tokens seen before.

        Only blocks that were not complete before are hashed.
        """
        unhashed = self.unhashed(len(tokens))
        if unhashed:
            self._hash(tokens, unhashed)
        return self._block_hashes

    def extend_by(self, tokens: array[int], max_tokens: int) -> None:
        """Hash at most `max_tokens` more tokens, but at least one block."""
        self._hash(tokens, min(self.unhashed(len(tokens)), max(max_tokens, self._block_size)))

    def _hash(self, tokens: array[int], count: int) -> None:
        """Hash the complete blocks among the next `count` tokens."""
        known, size = len(self._block_hashes), self._block_size
        parent = self._block_hashes[-1] if self._block_hashes else self.root
        self._block_hashes += _hashes_of_blocks(parent, tokens, known, known + count // size, size)

    def unhashed(self, length: int) -> int:
        """Return the number of tokens in complete blocks of a sequence of `length` that are not hashed yet."""
        return max(0, length // self._block_size - len(self._block_hashes)) * self._block_size
