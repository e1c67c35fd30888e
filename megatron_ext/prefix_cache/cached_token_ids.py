"""Token ids of cached blocks, kept on the host so that it can be said where a prompt parted from them (SI-5).

Blocks are listed under what they continue: the block hash before them, or the root of their keys. Roots differ between
salts, so nothing here is ever compared across them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ext.prefix_cache.hash_chain import BlockHash

TOKEN_BYTES = 4
MAX_COMPARED = 1024  # blocks that continue the same one; of more the first ones are compared


@dataclass(frozen=True)
class Divergence:
    """Where a sequence parts from the cached block that it agrees with longest.

    Attributes:
        agreeing: Tokens of the block that agree.
        there: The block's next token.
    """

    agreeing: int
    there: int


class CachedTokenIds:
    """See the module."""

    def __init__(self) -> None:
        self._tokens: dict[BlockHash, array[int]] = {}
        self._before: dict[BlockHash, BlockHash] = {}
        self._after: dict[BlockHash, dict[BlockHash, None]] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def bytes(self) -> int:
        """That the ids take."""
        return TOKEN_BYTES * sum(map(len, self._tokens.values()))

    def keep_run(
        self, block_hashes: Sequence[BlockHash], before: BlockHash, tokens: array[int], block_size: int, end: int
    ) -> None:
        """A run of blocks, which continues that of `before` or a root and ends before token `end`, is cached."""
        start = end - len(block_hashes) * block_size
        for i, block_hash in enumerate(block_hashes):
            self._tokens[block_hash] = tokens[start + i * block_size : start + (i + 1) * block_size]
            self._before[block_hash] = before
            self._after.setdefault(before, {})[block_hash] = None
            before = block_hash

    def drop(self, block_hash: BlockHash) -> None:
        """The block of `block_hash`, which nothing cached continues, is not cached any more."""
        if self._tokens.pop(block_hash, None) is not None:
            before = self._before.pop(block_hash)
            siblings = self._after[before]
            del siblings[block_hash]
            if not siblings:
                del self._after[before]

    def clear(self) -> None:
        """Forget all."""
        self._tokens.clear()
        self._before.clear()
        self._after.clear()

    def divergence(self, before: BlockHash, tokens: array[int]) -> Divergence | None:
        """Of the blocks that continue `before`, the one that agrees longest with `tokens`; None if there is none.

        Args:
            before: A block hash, or a root.
            tokens: Of a whole block that is not cached.
        """
        best: Divergence | None = None
        for i, block_hash in enumerate(self._after.get(before, ())):
            if i == MAX_COMPARED:
                break
            kept = self._tokens[block_hash]
            agreeing = _agreeing(kept, tokens)
            assert agreeing < len(kept), "this block is cached"
            if best is None or agreeing > best.agreeing:
                best = Divergence(agreeing, kept[agreeing])
        return best

    def check(self, cached: set[BlockHash]) -> None:
        """Assert that nothing is kept that is not cached."""
        assert self._tokens.keys() <= cached, "tokens outlive their block"
        assert {one for group in self._after.values() for one in group} == self._tokens.keys()
        assert all(self._after.values()), "a list of blocks is kept of which none is cached"


def _agreeing(one: array[int], other: array[int]) -> int:
    """Tokens that two have in common from their start, by halving."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low
