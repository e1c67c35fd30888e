"""Data kept with cached blocks beside keys and values: prompt log-probs and routing rows.

Both depend on the tokens up to a block's end, and the block hash identifies just these. So they are found by block
hash, and the cache drops them with the block: they need not know of moves, copies and block ids. All ranks know *which*
blocks have data, since that decides which tokens requests skip; the data itself is where it is read. Log-probs are on
the last stage's device, in the rows of the blocks (`memory/pools.py`); routing rows are here, on rank 0 alone.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Sequence
from itertools import takewhile

from megatron_ext.prefix_cache.hash_chain import BlockHash


class DataKind(enum.Enum):
    """Kind of data that is kept with blocks."""

    LOG_PROBS = enum.auto()  # of all tokens, and the hidden state at the block's end
    ROUTING = enum.auto()  # routing indices of all tokens


class KeptData:
    """Table of the data kept with cached blocks, by kind and block hash."""

    def __init__(self) -> None:
        self._kept: dict[DataKind, dict[BlockHash, bytes]] = {kind: {} for kind in DataKind}

    def run(self, block_hashes: Sequence[BlockHash], kinds: Collection[DataKind]) -> int:
        """Return the number of blocks, from the first, that have data of all `kinds`, at least one."""
        return min(sum(1 for _ in takewhile(self._kept[kind].__contains__, block_hashes)) for kind in kinds)

    def keep(self, kind: DataKind, block_hashes: Iterable[BlockHash]) -> list[BlockHash]:
        """Note that cached blocks have data of a kind from now on; return the blocks that had none."""
        table = self._kept[kind]
        new = [block_hash for block_hash in block_hashes if block_hash not in table]
        table.update(dict.fromkeys(new, b""))
        return new

    def store_rows(self, block_hash: BlockHash, rows: bytes) -> None:
        """Store the routing rows of a block; do nothing if none are kept with it, or none any more."""
        if block_hash in self._kept[DataKind.ROUTING]:
            self._kept[DataKind.ROUTING][block_hash] = rows

    def rows(self, block_hashes: Iterable[BlockHash]) -> bytes:
        """Return the routing rows of consecutive blocks, all of which have some."""
        return b"".join(map(self._kept[DataKind.ROUTING].__getitem__, block_hashes))

    def drop(self, block_hashes: Collection[BlockHash]) -> None:
        """Forget all data of blocks, some of which may have none."""
        for table in filter(None, self._kept.values()):
            for block_hash in block_hashes:
                table.pop(block_hash, None)

    def clear(self) -> None:
        """Forget all data."""
        for table in self._kept.values():
            table.clear()

    def check(self, cached: Iterable[BlockHash]) -> None:
        """Assert that only cached blocks have data."""
        known = set(cached)
        for kind, table in self._kept.items():
            assert table.keys() <= known, f"{kind.name} of blocks that are not cached"
