"""Record of the cached blocks whose tokens' log-probs are kept with them.

The log-prob of a token depends on it and on the tokens before, which are what the block's hash names. The numbers
themselves are on the device (`memory/log_prob_pool.py`), in the rows of the blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile

from megatron_ext.prefix_cache.hash_chain import BlockHash


class KeptLogProbs:
    """Hashes of cached blocks with log-probs of all their tokens, and the hidden state at their end."""

    def __init__(self) -> None:
        self._kept: set[BlockHash] = set()

    def __len__(self) -> int:
        return len(self._kept)

    def run(self, block_hashes: Sequence[BlockHash]) -> int:
        """Return the number of blocks, from the first, that have log-probs."""
        return sum(1 for _ in takewhile(self._kept.__contains__, block_hashes))

    def keep(self, block_hashes: Iterable[BlockHash]) -> list[BlockHash]:
        """Note that the log-probs of cached blocks have been written; return the blocks that had none."""
        new = [block_hash for block_hash in block_hashes if block_hash not in self._kept]
        self._kept.update(new)
        return new

    def drop(self, block_hashes: Iterable[BlockHash]) -> None:
        """Forget the log-probs of blocks, some of which may have none."""
        if self._kept:
            self._kept.difference_update(block_hashes)

    def clear(self) -> None:
        """Forget all log-probs."""
        self._kept.clear()

    def check(self, cached: Iterable[BlockHash]) -> None:
        """Assert that only cached blocks have log-probs."""
        assert self._kept.issubset(cached), "log-probs of blocks that are not cached"
