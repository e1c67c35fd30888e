"""The pool of KV blocks: a free list and reference counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Generic, NewType, Protocol, TypeVar

Place = TypeVar("Place", bound=int)


class FreePlaces(Protocol[Place]):
    """Free places, which a pool takes and gives back."""

    def __len__(self) -> int:
        """Return the number of places that `take` can hand out."""

    def __iter__(self) -> Iterator[Place]: ...

    def take(self, count: int) -> list[Place]:
        """Remove and return `count` free places."""

    def give(self, places: Sequence[Place]) -> None:
        """Add places, which are free now."""


class Stack(Generic[Place]):
    """Free places of a pool of fixed size: the last one given is taken first.

    Args:
        places: Places that are free at first, in the order in which they are taken.
    """

    def __init__(self, places: Iterable[Place]) -> None:
        self._free = list(places)[::-1]

    def __len__(self) -> int:
        return len(self._free)

    def __iter__(self) -> Iterator[Place]:
        return iter(self._free)

    def take(self, count: int) -> list[Place]:
        """Remove and return the places that were given last, the very last first."""
        first = len(self._free) - count
        taken = self._free[first:][::-1]
        del self._free[first:]
        return taken

    def give(self, places: Sequence[Place]) -> None:
        """Add places, which are free now."""
        self._free += places


BlockId = NewType("BlockId", int)


class BlockPool:
    """Allocator of blocks 0 .. total - 1; a block is free if it has no reference and is not kept for its contents.

    Args:
        total: Blocks in the pool, without the dummy block that padding may point to.
        free: Free blocks; None if all of them are, and always are blocks.
    """

    def __init__(self, total: int, free: FreePlaces[BlockId] | None = None) -> None:
        assert total >= 1, total
        self.total = total
        self._references = [0] * total
        self._free: FreePlaces[BlockId] = Stack(map(BlockId, range(total))) if free is None else free

    @property
    def free_count(self) -> int:
        """Number of blocks that `allocate` can hand out."""
        return len(self._free)

    def references(self, block: BlockId) -> int:
        """Return the number of owners of `block`."""
        return self._references[block]

    def releasable(self, tables: Iterable[Sequence[BlockId]]) -> set[BlockId]:
        """Return the blocks that would become available if these tables were released together."""
        counts = Counter(chain.from_iterable(tables))
        return {block for block, count in counts.items() if self._references[block] == count}

    def allocate(self, count: int) -> list[BlockId]:
        """Take `count` free blocks, one reference each; the planner ensures that enough are free."""
        assert 0 <= count <= len(self._free), f"{count} blocks asked, {len(self._free)} free"
        blocks = self._free.take(count)
        references = self._references
        for block in blocks:
            references[block] = 1
        return blocks

    def release(self, blocks: Iterable[BlockId]) -> None:
        """Drop one reference per occurrence; a block without references is free again."""
        self.free(self.let_go(blocks))

    def let_go(self, blocks: Iterable[BlockId]) -> list[BlockId]:
        """Drop one reference per occurrence without freeing anything.

        Returns:
            Blocks without references now, in that order; they are kept for their contents, or freed next.
        """
        references, unused = self._references, []
        for block in blocks:
            left = references[block] - 1
            references[block] = left
            if left <= 0:
                assert not left, f"block {block} released more often than taken"
                unused.append(block)
        return unused

    def retain(self, blocks: Sequence[BlockId]) -> list[BlockId]:
        """Add a reference to each of these blocks, which are in use or kept for their contents.

        Returns:
            Blocks that had no reference before, in the given order.
        """
        references = self._references
        unused = [block for block in blocks if not references[block]]
        for block in blocks:
            references[block] += 1
        return unused

    def free(self, blocks: Sequence[BlockId]) -> None:
        """Add blocks without references to the free list, since their contents are not kept."""
        assert not any(map(self._references.__getitem__, blocks)), f"some of {blocks} are in use"
        self._free.give(blocks)

    def follow_moves(self, moves: Mapping[BlockId, BlockId]) -> None:
        """Note that the contents of blocks are in others now, old to new."""
        for old, new in moves.items():
            self._references[new], self._references[old] = self._references[old], 0

    def check(self, kept: Iterable[BlockId] = (), others: Sequence[BlockId] = ()) -> None:
        """Assert that free, used and `kept` blocks make up the pool, each exactly once, without `others`."""
        free = set(self._free)
        assert len(free) == len(list(self._free)), "a block is free twice"
        used = {block for block, count in enumerate(self._references) if count > 0}
        assert not free & used, f"blocks {sorted(free & used)} are free and in use"
        unused = set(kept)
        assert not unused & (free | used), f"blocks {sorted(unused & (free | used))} are kept and something else"
        blocks = free | used | unused
        assert blocks.isdisjoint(others), "a block lies where a snapshot does"
        assert blocks.union(others) == set(range(self.total)), "blocks were lost, or came from elsewhere"
        assert min(self._references) >= 0, "a negative reference count"
