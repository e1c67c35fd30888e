"""Token ids of cached blocks, kept on the host to explain where a prompt diverged from them (SI-5).

Blocks are listed under their parent: the previous block's hash, or the root hash. Roots differ between salts, so tokens
are never compared across salts.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ext.prefix_cache.hash_chain import BlockHash

TOKEN_BYTES = 4
MAX_COMPARED = 1024  # children of one block that are compared; the first ones if there are more


@dataclass(frozen=True)
class Divergence:
    """Point where a sequence diverges from the cached block with the longest common start.

    Attributes:
        agreeing: Common tokens from the start of the block.
        there: Next token id of the cached block.
    """

    agreeing: int
    there: int


class CachedTokenIds:
    """Store of the token ids of cached blocks, by block hash."""

    def __init__(self) -> None:
        self._tokens: dict[BlockHash, array[int]] = {}
        self._before: dict[BlockHash, BlockHash] = {}
        self._after: dict[BlockHash, dict[BlockHash, None]] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def bytes(self) -> int:
        """Bytes of all stored ids."""
        return TOKEN_BYTES * sum(map(len, self._tokens.values()))

    def keep_run(
        self, block_hashes: Sequence[BlockHash], before: BlockHash, tokens: array[int], block_size: int, end: int
    ) -> None:
        """Store the ids of a cached run of blocks, which continues the block or root `before` and ends at `end`."""
        start = end - len(block_hashes) * block_size
        for i, block_hash in enumerate(block_hashes):
            self._tokens[block_hash] = tokens[start + i * block_size : start + (i + 1) * block_size]
            self._before[block_hash] = before
            self._after.setdefault(before, {})[block_hash] = None
            before = block_hash

    def drop(self, block_hash: BlockHash) -> None:
        """Drop the ids of the block of `block_hash`, which is evicted and has no cached child."""
        if self._tokens.pop(block_hash, None) is not None:
            before = self._before.pop(block_hash)
            siblings = self._after[before]
            del siblings[block_hash]
            if not siblings:
                del self._after[before]

    def clear(self) -> None:
        """Drop all ids."""
        self._tokens.clear()
        self._before.clear()
        self._after.clear()

    def divergence(self, before: BlockHash, tokens: array[int]) -> Divergence | None:
        """Return where `tokens` diverge from the child of `before` with the longest common start; None without one.

        Args:
            before: Block hash or root hash.
            tokens: Token ids of a whole block that is not cached.
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
        """Assert that ids are stored for cached blocks only."""
        assert self._tokens.keys() <= cached, "tokens outlive their block"
        assert {one for group in self._after.values() for one in group} == self._tokens.keys()
        assert all(self._after.values()), "a list of blocks is kept of which none is cached"


def _agreeing(one: array[int], other: array[int]) -> int:
    """Return the length of the common start of two arrays, by bisection."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low
