"""Order of cached entries by worth, in which they are written to disk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile

from megatron_ext.prefix_cache.block_index import BlockIndex
from megatron_ext.prefix_cache.eviction import LeafFirstLru
from megatron_ext.prefix_cache.hash_chain import BlockHash


def by_worth(
    index: BlockIndex, unused: LeafFirstLru, snapshots: Sequence[BlockHash]
) -> Iterator[tuple[BlockHash, bool]]:
    """Yield block hashes and whether each stands for a snapshot; see `PrefixCache.by_worth`.

    Args:
        index: Index of the cached blocks.
        unused: Blocks that no request uses.
        snapshots: Snapshots, by falling worth.
    """
    yielded: set[BlockHash] = set()
    in_use = [block for block in index if block not in unused]
    blocks = [index.hash_of(block) for block in (*in_use, *reversed(list(unused)))]
    for ends, has_snapshot in ((snapshots, True), (blocks, False)):
        for end in ends:
            chain = takewhile(lambda one: one not in yielded, (end, *index.ancestors(end)))
            for block_hash in reversed(list(chain)):
                yielded.add(block_hash)
                yield block_hash, False
            if has_snapshot:
                yield end, True
