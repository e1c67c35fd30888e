"""Which digest is in which block, and which block continues which."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import nlargest

from megatron_ext.prefix_cache.block_pool import BlockId
from megatron_ext.prefix_cache.hash_chain import Digest


@dataclass
class _Entry:
    block: BlockId
    parent: Digest | None  # None for the first block of a sequence
    depth: int  # blocks from the start of the sequence, this one included
    children: int = 0
    hits: int = 0  # requests that resumed at the end of this block


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

    def longest_run(self, digests: Sequence[Digest]) -> list[BlockId]:
        """Blocks of the longest indexed run from the start; a hole ends it."""
        blocks = []
        for digest in digests:
            entry = self._entries.get(digest)
            if entry is None:
                break
            blocks.append(entry.block)
        return blocks

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
