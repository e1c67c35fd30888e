"""The pool of KV blocks: a free list, reference counts, and evictable blocks, kept for their contents."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NewType

BlockId = NewType("BlockId", int)


class BlockPool:
    """Hands out blocks 0 .. total - 1; a block is free when nobody refers to it and it is not kept for its contents.

    Args:
        total: Blocks in the pool (the dummy block that padding may point to is not one of them).
    """

    def __init__(self, total: int) -> None:
        assert total >= 1, total
        self.total = total
        self._references = [0] * total
        self._free = [BlockId(block) for block in reversed(range(total))]  # a stack: last released, first reused
        self.evictable: set[BlockId] = set()

    @property
    def free_count(self) -> int:
        """Blocks that `allocate` can hand out."""
        return len(self._free)

    def references(self, block: BlockId) -> int:
        """How many owners `block` has."""
        return self._references[block]

    def allocate(self, count: int) -> list[BlockId]:
        """Take `count` free blocks, one reference each. The planner has made sure that there are as many."""
        assert 0 <= count <= len(self._free), f"{count} blocks asked, {len(self._free)} free"
        first = len(self._free) - count
        blocks = self._free[first:][::-1]
        del self._free[first:]
        references = self._references
        for block in blocks:
            references[block] = 1
        return blocks

    def release(self, blocks: Iterable[BlockId]) -> None:
        """Drop one reference per occurrence; a block without references is free again."""
        references, free = self._references, self._free
        for block in blocks:
            assert references[block] > 0, f"block {block} released more often than taken"
            references[block] -= 1
            if references[block] == 0:
                free.append(block)

    def retain(self, block: BlockId) -> None:
        """Add a reference to a block that is in use or evictable."""
        assert self._references[block] > 0 or block in self.evictable, f"block {block} is free"
        self.evictable.discard(block)
        self._references[block] += 1

    def make_evictable(self, block: BlockId) -> None:
        """Drop the last reference to `block` without freeing it."""
        assert self._references[block] == 1, f"block {block} has {self._references[block]} references"
        self._references[block] = 0
        self.evictable.add(block)

    def free(self, block: BlockId) -> None:
        """An evictable block is free again."""
        self.evictable.remove(block)
        self._free.append(block)

    def check(self) -> None:
        """Assert that free, used and evictable blocks make up the pool, each exactly once."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        used = {block for block, count in enumerate(self._references) if count > 0}
        assert not free & used, f"blocks {sorted(free & used)} are free and in use"
        assert not self.evictable & (free | used), (
            f"blocks {sorted(self.evictable & (free | used))} are evictable and something else"
        )
        assert free | used | self.evictable == set(range(self.total)), "blocks were lost, or came from elsewhere"
        assert min(self._references) >= 0, "a negative reference count"
