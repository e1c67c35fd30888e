"""Which digest is in which block, and which block continues which."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from itertools import islice
from typing import overload

from megatron_ext.prefix_cache.block_pool import BlockId
from megatron_ext.prefix_cache.hash_chain import Digest


@dataclass
class _Entry:
    block: BlockId
    parent: Digest | None  # None for the first block of a sequence
    depth: int  # blocks from the start of the sequence, this one included
    children: int = 0
    hits: int = 0  # requests that resumed at the end of this block


class CachedRun(Sequence[BlockId]):
    """Blocks of a cached run, looked up when asked for; good until something is indexed or forgotten.

    A run of thousands of blocks whose length alone decides costs a few look-ups.
    """

    def __init__(self, entries: Mapping[Digest, _Entry], digests: Sequence[Digest], length: int) -> None:
        self._entries, self._digests, self._length = entries, digests, length

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> BlockId: ...

    @overload
    def __getitem__(self, index: slice) -> list[BlockId]: ...

    def __getitem__(self, index: int | slice) -> BlockId | list[BlockId]:
        entries, digests = self._entries, self._digests
        if isinstance(index, slice):
            return [entries[digests[i]].block for i in range(*index.indices(self._length))]
        return entries[digests[range(self._length)[index]]].block

    def __iter__(self) -> Iterator[BlockId]:
        return (self._entries[digest].block for digest in islice(self._digests, self._length))

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # how Python says that it has none


@dataclass(frozen=True)
class CachedPrefix:
    """A cached run of blocks from the start of a sequence, named by the digest of its last one."""

    digest: Digest
    blocks: int
    hits: int


class BlockIndex:
    """A forest of digests. A block is found by one look-up, and knows how many cached blocks continue it."""

    def __init__(self) -> None:
        self._entries: dict[Digest, _Entry] = {}
        self._digest_of: dict[BlockId, Digest] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, block: BlockId) -> bool:
        """Whether `block` is indexed."""
        return block in self._digest_of

    def __iter__(self) -> Iterator[BlockId]:
        """All indexed blocks."""
        return iter(tuple(self._digest_of))

    def find(self, digest: Digest) -> BlockId | None:
        """The block that holds `digest`, or None."""
        entry = self._entries.get(digest)
        return None if entry is None else entry.block

    def digest_of(self, block: BlockId) -> Digest:
        """What the indexed `block` holds."""
        return self._digest_of[block]

    def longest_run(self, digests: Sequence[Digest]) -> CachedRun:
        """Blocks of the longest indexed run from the start; a hole ends it.

        An indexed block's parents are indexed (`add` and `remove` see to that), so the end is found by doubling and
        halving: a look-up for each doubling of the run, not for each block.
        """
        low, high = 0, 1  # blocks: `low` of them are indexed; `high`, once it is found out, are not
        while high <= len(digests) and digests[high - 1] in self._entries:
            low, high = high, 2 * high
        high = min(high, len(digests) + 1)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if digests[middle - 1] in self._entries else (low, middle)
        return CachedRun(self._entries, digests, low)

    def add(self, digest: Digest, block: BlockId, parent: Digest | None) -> None:
        """Index `block`, whose parent, if it has one, must be indexed."""
        assert digest not in self._entries, "a digest has one block"
        assert block not in self._digest_of, f"block {block} holds one digest"
        depth = 1
        if parent is not None:
            self._entries[parent].children += 1
            depth += self._entries[parent].depth
        self._entries[digest] = _Entry(block, parent, depth)
        self._digest_of[block] = digest

    def remove(self, block: BlockId) -> Digest:
        """Forget `block`, which no indexed block may continue, and tell what it held."""
        digest = self._digest_of.pop(block)
        entry = self._entries.pop(digest)
        assert entry.children == 0, f"block {block} has {entry.children} cached children"
        if entry.parent is not None:
            self._entries[entry.parent].children -= 1
        return digest

    def digests(self) -> Iterable[Digest]:
        """All indexed digests."""
        return self._entries.keys()

    def count_hit(self, block: BlockId) -> None:
        """A request has resumed at the end of `block`."""
        self._entries[self._digest_of[block]].hits += 1

    def hottest(self, count: int) -> list[CachedPrefix]:
        """The prefixes that most requests resumed from, the hottest first; among equals the longest."""
        hit = (CachedPrefix(digest, entry.depth, entry.hits) for digest, entry in self._entries.items() if entry.hits)
        return nlargest(count, hit, key=lambda prefix: (prefix.hits, prefix.blocks))

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()
        self._digest_of.clear()

    def depth(self, digest: Digest) -> int:
        """Blocks from the start of the sequence to the end of the indexed `digest`."""
        return self._entries[digest].depth

    def hits(self, digest: Digest) -> int:
        """Requests that have resumed at the end of the indexed `digest`."""
        return self._entries[digest].hits

    def ancestors(self, digest: Digest) -> Iterator[Digest]:
        """What the indexed `digest` continues, the nearest first."""
        parent = self._entries[digest].parent
        while parent is not None:
            yield parent
            parent = self._entries[parent].parent

    def children(self, block: BlockId) -> int:
        """Indexed blocks that continue `block`."""
        return self._entries[self._digest_of[block]].children

    def parent(self, block: BlockId) -> BlockId | None:
        """The block that `block` continues; None for the first of a sequence."""
        parent = self._entries[self._digest_of[block]].parent
        return None if parent is None else self._entries[parent].block

    def check(self) -> None:
        """Assert that the two maps are inverse, every parent is there, and children are counted right."""
        assert {entry.block: digest for digest, entry in self._entries.items()} == self._digest_of
        counts = dict.fromkeys(self._entries, 0)
        for entry in self._entries.values():
            if entry.parent is not None:
                assert entry.parent in counts, f"the parent of block {entry.block} is not indexed"
                counts[entry.parent] += 1
            parent_depth = 0 if entry.parent is None else self._entries[entry.parent].depth
            assert entry.depth == parent_depth + 1, f"block {entry.block} is at the wrong depth"
        assert all(entry.children == counts[digest] for digest, entry in self._entries.items()), "children miscounted"
