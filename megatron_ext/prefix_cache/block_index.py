"""Index of cached blocks: block hash to block, and each block's parent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from itertools import count, islice
from typing import overload

from megatron_ext.prefix_cache.block_pool import BlockId
from megatron_ext.prefix_cache.hash_chain import BlockHash


class CachedRun(Sequence[BlockId]):
    """Blocks of a cached run, looked up lazily; valid until the index changes.

    A run of thousands of blocks costs a few look-ups if only its length is needed.
    """

    def __init__(self, blocks: Mapping[BlockHash, BlockId], block_hashes: Sequence[BlockHash], length: int) -> None:
        self._blocks, self._block_hashes, self._length = blocks, block_hashes, length

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> BlockId: ...

    @overload
    def __getitem__(self, index: slice) -> list[BlockId]: ...

    def __getitem__(self, index: int | slice) -> BlockId | list[BlockId]:
        blocks, block_hashes = self._blocks, self._block_hashes
        if isinstance(index, slice):
            return [blocks[block_hashes[i]] for i in range(*index.indices(self._length))]
        return blocks[block_hashes[range(self._length)[index]]]

    def __iter__(self) -> Iterator[BlockId]:
        return map(self._blocks.__getitem__, islice(self._block_hashes, self._length))

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # Python's way to make a class unhashable


@dataclass(frozen=True)
class CachedPrefix:
    """Cached run of blocks from the start of a sequence, named by the hash of its last block."""

    block_hash: BlockHash
    blocks: int
    hits: int


class BlockIndex:
    """Forest of block hashes, with one look-up to find a block, and the number of cached children of each block.

    Each property of a block hash has a dictionary of its own, so that a run is indexed by a few bulk updates.
    """

    def __init__(self) -> None:
        self._blocks: dict[BlockHash, BlockId] = {}
        self._hash_of: dict[BlockId, BlockHash] = {}
        self._parents: dict[BlockHash, BlockHash | None] = {}  # None for the first block of a sequence
        self._depths: dict[BlockHash, int] = {}  # blocks from the start of the sequence, this one included
        self._children: dict[BlockHash, int] = {}  # number of children, if any
        self._hits: dict[BlockHash, int] = {}  # requests that resumed at the end of the block, if any did

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: BlockId) -> bool:
        """Return whether `block` is indexed."""
        return block in self._hash_of

    def __iter__(self) -> Iterator[BlockId]:
        """Iterate over all indexed blocks."""
        return iter(tuple(self._hash_of))

    def find(self, block_hash: BlockHash) -> BlockId | None:
        """Return the block that holds `block_hash`, or None."""
        return self._blocks.get(block_hash)

    def among(self, blocks: Iterable[BlockId]) -> list[BlockId]:
        """Return the indexed blocks among `blocks`, in their order."""
        hash_of = self._hash_of
        return [block for block in blocks if block in hash_of]

    def hash_of(self, block: BlockId) -> BlockHash:
        """Return the block hash of the indexed `block`."""
        return self._hash_of[block]

    def longest_run(self, block_hashes: Sequence[BlockHash]) -> CachedRun:
        """Return the longest indexed run of blocks from the start; a hole ends it.

        An indexed block's parents are indexed (`add` and `remove` ensure that), so the end is found by doubling and
        bisection: O(log n) look-ups for a run of n blocks.
        """
        blocks, low, high = self._blocks, 0, 1  # `low` blocks are indexed; `high` blocks are not, once found
        while high <= len(block_hashes) and block_hashes[high - 1] in blocks:
            low, high = high, 2 * high
        high = min(high, len(block_hashes) + 1)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if block_hashes[middle - 1] in blocks else (low, middle)
        return CachedRun(blocks, block_hashes, low)

    def add(self, block_hashes: Sequence[BlockHash], blocks: Sequence[BlockId], parent: BlockHash | None) -> None:
        """Index a run of at least one block; the parent of the first block, if any, must be indexed."""
        assert self._blocks.keys().isdisjoint(block_hashes), "a digest has one block"
        assert self._hash_of.keys().isdisjoint(blocks), f"each of {blocks} holds one digest"
        depth = 0 if parent is None else self._depths[parent]
        if parent is not None:
            self._children[parent] = self._children.get(parent, 0) + 1
        self._blocks.update(zip(block_hashes, blocks, strict=True))
        self._hash_of.update(zip(blocks, block_hashes, strict=True))
        self._parents.update(zip(block_hashes, [parent, *block_hashes[:-1]], strict=True))
        self._depths.update(zip(block_hashes, count(depth + 1)))
        self._children.update(dict.fromkeys(block_hashes[:-1], 1))

    def remove(self, blocks: Iterable[BlockId]) -> list[BlockHash]:
        """Remove `blocks`, each after its children, and return their block hashes."""
        hash_of, children, hits = self._hash_of, self._children, self._hits
        removed = []
        for block in blocks:
            block_hash = hash_of.pop(block)
            assert block_hash not in children, f"block {block} has {children[block_hash]} cached children"
            del self._blocks[block_hash], self._depths[block_hash]
            if hits:
                hits.pop(block_hash, None)
            parent = self._parents.pop(block_hash)
            if parent is not None:
                children[parent] -= 1
                if not children[parent]:
                    del children[parent]
            removed.append(block_hash)
        return removed

    def follow_moves(self, moves: Mapping[BlockId, BlockId]) -> None:
        """Note that the contents of blocks, indexed or not, are in others now, old to new."""
        for old in moves.keys() & self._hash_of.keys():
            block_hash = self._hash_of.pop(old)
            self._hash_of[moves[old]] = block_hash
            self._blocks[block_hash] = moves[old]

    def block_hashes(self) -> Iterable[BlockHash]:
        """Return all indexed block hashes."""
        return self._blocks.keys()

    def count_hit(self, block: BlockId) -> None:
        """Count a request that has resumed at the end of `block`."""
        block_hash = self._hash_of[block]
        self._hits[block_hash] = self._hits.get(block_hash, 0) + 1

    def hottest(self, limit: int) -> list[CachedPrefix]:
        """Return the prefixes that most requests resumed from, the hottest first; among equals the longest."""
        hit = (CachedPrefix(block_hash, self._depths[block_hash], hits) for block_hash, hits in self._hits.items())
        return nlargest(limit, hit, key=lambda prefix: (prefix.hits, prefix.blocks))

    def clear(self) -> None:
        """Remove all blocks."""
        for table in (self._blocks, self._hash_of, self._parents, self._depths, self._children, self._hits):
            table.clear()

    def depth(self, block_hash: BlockHash) -> int:
        """Return the depth of the indexed `block_hash`: blocks from the start of the sequence to its end."""
        return self._depths[block_hash]

    def parent_hash(self, block_hash: BlockHash) -> BlockHash | None:
        """Return the hash of the block before the indexed `block_hash`; None at the start of a sequence."""
        return self._parents[block_hash]

    def ancestors(self, block_hash: BlockHash) -> Iterator[BlockHash]:
        """Iterate over the ancestors of the indexed `block_hash`, the nearest first."""
        parent = self._parents[block_hash]
        while parent is not None:
            yield parent
            parent = self._parents[parent]

    def descendants(self, block_hash: BlockHash) -> list[BlockId]:
        """Return the block of `block_hash`, if it is indexed, and all that continue it, each after its children.

        Looks at all indexed blocks.
        """
        found = {block_hash} & self._blocks.keys()
        for one in sorted(self._depths, key=self._depths.__getitem__):
            if self._parents[one] in found:
                found.add(one)
        return [self._blocks[one] for one in sorted(found, key=self._depths.__getitem__, reverse=True)]

    def children(self, block: BlockId) -> int:
        """Return the number of indexed children of `block`."""
        return self._children.get(self._hash_of[block], 0)

    def parent(self, block: BlockId) -> BlockId | None:
        """Return the parent of `block`; None for the first block of a sequence."""
        parent = self._parents[self._hash_of[block]]
        return None if parent is None else self._blocks[parent]

    def check(self) -> None:
        """Assert that the maps agree, that every parent is indexed, and that depths and child counts are right."""
        assert {block: block_hash for block_hash, block in self._blocks.items()} == self._hash_of
        assert self._blocks.keys() == self._parents.keys() == self._depths.keys(), "a digest is known in part"
        parents = [parent for parent in self._parents.values() if parent is not None]
        assert self._blocks.keys() >= {*parents}, "the parent of a block is not indexed"
        assert Counter(parents) == self._children, "children miscounted"
        assert self._hits.keys() <= self._blocks.keys(), "hits of a block that is not indexed"
        for block_hash, parent in self._parents.items():
            depth = 1 if parent is None else self._depths[parent] + 1
            assert self._depths[block_hash] == depth, f"block {self._blocks[block_hash]} is at the wrong depth"
