"""Which digest is in which block, and which block continues which."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from megatron_ext.prefix_cache.block_pool import BlockId
from megatron_ext.prefix_cache.hash_chain import Digest


@dataclass
class _Entry:
    block: BlockId
    parent: Digest | None  # None for the first block of a sequence
    children: int = 0


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
        if parent is not None:
            self._entries[parent].children += 1
        self._entries[digest] = _Entry(block, parent)
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
        assert all(entry.children == counts[digest] for digest, entry in self._entries.items()), "children miscounted"
