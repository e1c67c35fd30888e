"""Token ids of cached blocks, kept on the host to explain where a prompt diverged from them (SI-5).

Blocks are listed under their parent: the previous block's hash, or the root hash. So are the ends of earlier requests
inside a block that they did not complete. Roots differ between salts, so neither tokens nor times are ever compared
across salts.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_ext.prefix_cache.hash_chain import BlockHash

MAX_COMPARED = 1024  # children of one block that are compared; the first ones if there are more
MAX_ENDS = 4096  # ends of earlier requests, the newest

_End = tuple[BlockHash, bytes]  # hash before an incomplete block, and its tokens


@dataclass(frozen=True)
class Divergence:
    """Point where a sequence diverges from the cached block with the longest common start, or goes on after another.

    Attributes:
        agreeing: Common tokens from the start of the block.
        age: Seconds since that block was cached, or since the other request ended.
        there: Next token id of the cached block; None at the end of another request, inside a block.
    """

    agreeing: int
    age: float
    there: int | None = None


class CachedTokenIds:
    """Store of the token ids of cached blocks, by block hash, and of the times when they were cached.

    Args:
        clock: Present time in seconds, on any monotonic clock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tokens: dict[BlockHash, array[int]] = {}
        self._cached_at: dict[BlockHash, float] = {}
        self._before: dict[BlockHash, BlockHash] = {}
        self._after: dict[BlockHash, dict[BlockHash, None]] = {}
        self._ended_at: dict[_End, float] = {}  # by parent and tokens of an incomplete block
        self._ends: dict[BlockHash, dict[bytes, None]] = {}  # the same keys, by parent

    def keep_run(
        self, block_hashes: Sequence[BlockHash], before: BlockHash, tokens: array[int], block_size: int, end: int
    ) -> None:
        """Store the ids of a cached run of blocks, which continues the block or root `before` and ends at `end`."""
        start, now = end - len(block_hashes) * block_size, self._clock()
        for i, block_hash in enumerate(block_hashes):
            self._tokens[block_hash] = tokens[start + i * block_size : start + (i + 1) * block_size]
            self._cached_at.setdefault(block_hash, now)
            self._before[block_hash] = before
            self._after.setdefault(before, {})[block_hash] = None
            before = block_hash

    def keep_end(self, before: BlockHash, tokens: array[int]) -> None:
        """Store the last tokens of a request that has ended: those after the block or root `before`."""
        end = (before, tokens.tobytes())
        self._ended_at.pop(end, None)
        if len(self._ended_at) == MAX_ENDS:
            self._forget_end(next(iter(self._ended_at)))
        self._ended_at[end] = self._clock()
        self._ends.setdefault(before, {})[end[1]] = None

    def _forget_end(self, end: _End) -> None:
        del self._ended_at[end], self._ends[end[0]][end[1]]
        if not self._ends[end[0]]:
            del self._ends[end[0]]

    def find(self, block_hash: BlockHash) -> tuple[BlockHash, array[int]]:
        """Return the block or root before a cached block, and the block's token ids."""
        return self._before[block_hash], self._tokens[block_hash]

    def drop(self, block_hash: BlockHash) -> None:
        """Drop the ids of the block of `block_hash`, which is evicted and has no cached child."""
        if self._tokens.pop(block_hash, None) is not None:
            del self._cached_at[block_hash]
            before = self._before.pop(block_hash)
            siblings = self._after[before]
            del siblings[block_hash]
            if not siblings:
                del self._after[before]
            for tail in self._ends.pop(block_hash, ()):
                del self._ended_at[block_hash, tail]

    def clear(self) -> None:
        """Drop all ids."""
        for kept in (self._tokens, self._cached_at, self._before, self._after, self._ended_at, self._ends):
            kept.clear()

    def age(self, block_hash: BlockHash) -> float:
        """Return the seconds since a cached block was cached."""
        return self._clock() - self._cached_at[block_hash]

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
                best = Divergence(agreeing, self.age(block_hash), kept[agreeing])
        return best

    def earlier_end(self, before: BlockHash, tokens: array[int]) -> Divergence | None:
        """Return the last place in a block that is not cached where an earlier request ended; None without one.

        Args:
            before: Block hash or root hash.
            tokens: Token ids of the block; the earlier request agrees with them to its end.
        """
        content = tokens.tobytes()
        tail = max((one for one in self._ends.get(before, ()) if content.startswith(one)), key=len, default=None)
        if tail is None:
            return None
        return Divergence(len(tail) // tokens.itemsize, self._clock() - self._ended_at[before, tail])

    def check(self, cached: set[BlockHash]) -> None:
        """Assert that ids are stored for cached blocks only."""
        assert self._tokens.keys() <= cached, "tokens outlive their block"
        assert self._tokens.keys() == self._cached_at.keys(), "each block has a time"
        assert {(before, tail) for before, tails in self._ends.items() for tail in tails} == self._ended_at.keys()
        assert all(self._ends.values()), "a list of ends is kept that is empty"
        assert len(self._ended_at) <= MAX_ENDS
        assert {one for group in self._after.values() for one in group} == self._tokens.keys()
        assert all(self._after.values()), "a list of blocks is kept of which none is cached"


def _agreeing(one: array[int], other: array[int]) -> int:
    """Return the length of the common start of two arrays, by bisection."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low
