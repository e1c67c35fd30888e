"""Eviction by the compute that an entry saves for the bytes it takes, against its age (`flops`).

What Marconi (MLSys 2025) weighs, in the form of GreedyDual (Cao and Irani, 1997; with frequencies, Cherkasova, 1998): a
memory has an *age*, and an entry that is used stands at

    age at its last use + worth,        worth = operations saved / bytes * chance of being used again

The one that stands lowest goes, and the age becomes where it stood. So an entry of twice the worth outlives twice as
much that goes by unused, and the weight of worth against age follows from the load. Ages are worths, not times: they
move with evictions only, so that all ranks agree.

**Operations saved** are those from the snapshot before an entry, that would serve in its place, to its end: an edge is
charged for an edge. If that snapshot goes the edge is longer; who stands on it is looked at again when it comes up.

**Chance.** The states at the end of a turn that was continued, behind which the next turn left its own, are for those
who go back and edit only. What several requests resumed from, more are likely to.

**Bytes** are those of the memory that is short: blocks and slots are apart, so a snapshot is weighed by its slot, and a
block by blocks. Of blocks, leaves alone can go. With recurrent layers a leaf is worth its snapshot, over all blocks of
the edge, which save nothing without it, as it was when it came in line or lost its snapshot (a longer edge saves about
as much for a block); a leaf without a snapshot stands at its age alone: it still says where later requests part.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from megatron_ext.config.costs import EntryCosts
from megatron_ext.prefix_cache.aged_queue import AgedQueue
from megatron_ext.prefix_cache.block_index import BlockIndex
from megatron_ext.prefix_cache.block_pool import BlockId
from megatron_ext.prefix_cache.hash_chain import BlockHash
from megatron_ext.prefix_cache.snapshot_order import Rank

CONTINUED_CHANCE = 0.5  # that who comes next resumes from a snapshot behind which a later one stands


def chance(uses: int, *, is_continued: bool) -> float:
    """How likely another request uses an entry that so many have used, as a factor."""
    if is_continued and uses < 2:
        return CONTINUED_CHANCE
    return 1.0 + math.log2(1 + uses)


@dataclass(eq=False)
class _Snapshot:
    """A snapshot; one that is gone is kept by those that stand on it."""

    block_hash: BlockHash
    depth: int  # blocks
    rank: Rank
    below: _Snapshot | None  # the one before it in its sequence, when it was last used
    age: float  # of the slots, when it was last used
    uses: int = 0
    is_continued: bool = False
    is_there: bool = True

    def base(self) -> int:
        """Depth, in blocks, of the last snapshot before it that is still there; 0 if none is."""
        while self.below is not None and not self.below.is_there:
            self.below = self.below.below
        return 0 if self.below is None else self.below.depth


class FlopsSnapshots:
    """See the module; the contract is that of `SnapshotOrder`.

    Args:
        index: Of the blocks at whose ends snapshots stand.
        costs: Of blocks and states.
    """

    def __init__(self, index: BlockIndex, costs: EntryCosts) -> None:
        self._index, self._costs = index, costs
        self._snapshots: dict[BlockHash, _Snapshot] = {}
        self._queues: dict[Rank, AgedQueue[BlockHash]] = {rank: AgedQueue() for rank in Rank}
        self._age = 0.0

    def add(self, block_hash: BlockHash, rank: Rank) -> None:
        """What it stands on has been continued."""
        below = self._before(block_hash)
        self._snapshots[block_hash] = _Snapshot(block_hash, self._index.depth(block_hash), rank, below, self._age)
        self._put(block_hash)
        if below is not None and not below.is_continued:
            below.is_continued = True
            self._put(below.block_hash)

    def use(self, block_hash: BlockHash) -> None:
        """At the age of now."""
        snapshot = self._snapshots[block_hash]
        self._queues[snapshot.rank].discard(block_hash)
        snapshot.rank, snapshot.below, snapshot.age = Rank.ORDINARY, self._before(block_hash), self._age
        snapshot.uses += 1
        self._put(block_hash)

    def remove(self, block_hash: BlockHash) -> None:
        """It is gone."""
        snapshot = self._snapshots.pop(block_hash)
        snapshot.is_there = False
        self._queues[snapshot.rank].discard(block_hash)

    def evict(self, ranks: Sequence[Rank]) -> BlockHash | None:
        """The one that stands lowest."""
        queue = next((self._queues[rank] for rank in ranks if self._queues[rank]), None)
        if queue is None:
            return None
        block_hash, key = queue.pop(self._key)
        self._age = max(self._age, key)
        self._snapshots.pop(block_hash).is_there = False
        return block_hash

    def rank(self, block_hash: BlockHash) -> Rank | None:
        """Of a snapshot that is there; None of others."""
        snapshot = self._snapshots.get(block_hash)
        return None if snapshot is None else snapshot.rank

    def edge(self, block_hash: BlockHash) -> tuple[int, float] | None:
        """Blocks from the snapshot before to that of `block_hash`, and operations saved by chance.

        None if there is none.

        What `FlopsBlocks` weighs with the bytes of blocks.
        """
        snapshot = self._snapshots.get(block_hash)
        if snapshot is None:
            return None
        base = snapshot.base()
        likely = chance(snapshot.uses, is_continued=snapshot.is_continued)
        return snapshot.depth - base, self._costs.block_flops(base, snapshot.depth) * likely

    def clear(self) -> None:
        """Forget all."""
        self._snapshots.clear()
        for queue in self._queues.values():
            queue.clear()

    def check(self) -> None:
        """Assert that each snapshot is in the queue of its rank, and stands on nothing that it does not continue."""
        for rank, queue in self._queues.items():
            queue.check()
            assert set(queue) == {block_hash for block_hash, one in self._snapshots.items() if one.rank is rank}
        for snapshot in self._snapshots.values():
            assert snapshot.is_there, "a snapshot that is gone is listed"
            assert snapshot.base() < snapshot.depth, "a snapshot stands on a later one"

    def __iter__(self) -> Iterator[BlockHash]:
        return iter(self._snapshots)

    def _before(self, block_hash: BlockHash) -> _Snapshot | None:
        """The last snapshot before that of `block_hash`: a look-up for each block between them."""
        snapshots = self._snapshots
        return next((snapshots[one] for one in self._index.ancestors(block_hash) if one in snapshots), None)

    def _put(self, block_hash: BlockHash) -> None:
        self._queues[self._snapshots[block_hash].rank].put(block_hash, self._key(block_hash))

    def _key(self, block_hash: BlockHash) -> float:
        edge = self.edge(block_hash)
        assert edge is not None, "a snapshot that is gone is weighed"
        return self._snapshots[block_hash].age + edge[1] / max(1, self._costs.state_bytes)


class FlopsBlocks:
    """See the module; the contract is that of `EvictionPolicy`.

    Args:
        index: Of the blocks.
        costs: Of blocks and states.
        snapshots: Those at the ends of blocks; None in a model without recurrent layers.
    """

    keeps_unused = True

    def __init__(self, index: BlockIndex, costs: EntryCosts, snapshots: FlopsSnapshots | None) -> None:
        self._index, self._costs, self._snapshots = index, costs, snapshots
        self._ages: dict[BlockId, float] = {}  # of the blocks, when an evictable one was last used
        self._leaves: AgedQueue[BlockId] = AgedQueue()
        self._age = 0.0

    def hold(self, blocks: Iterable[BlockId]) -> None:
        """Keep them, as used at the age of now."""
        for block in blocks:
            assert block not in self._ages, f"block {block} made evictable twice"
            self._ages[block] = self._age
            if self._index.children(block) == 0:
                self._leaves.put(block, self._key(block))

    def reuse(self, blocks: Iterable[BlockId]) -> None:
        """In use again."""
        for block in blocks:
            del self._ages[block]
            self._leaves.discard(block)

    def evict(self, count: int) -> list[BlockId]:
        """The leaf that stands lowest, one after the other; what it continues may be a leaf from then on."""
        gone: dict[BlockId, int] = {}  # children of blocks that go now, and are in the index until this is done
        return [self._evict(gone) for _ in range(count)]

    def _evict(self, gone: dict[BlockId, int]) -> BlockId:
        block, key = self._leaves.pop()
        self._age = max(self._age, key)
        del self._ages[block]
        parent = self._index.parent(block)
        if parent is not None and parent in self._ages:
            gone[parent] = gone.get(parent, 0) + 1
            if gone[parent] == self._index.children(parent):
                self._leaves.put(parent, self._key(parent))
        return block

    def on_snapshot_removed(self, block_hash: BlockHash) -> None:
        """A block that stays has lost its snapshot: it stands lower."""
        block = self._index.find(block_hash)
        if block is not None and block in self._leaves:
            self._leaves.put(block, self._key(block))

    def clear(self) -> None:
        """Forget all."""
        self._ages.clear()
        self._leaves.clear()

    def check(self) -> None:
        """Assert that the evictable leaves are in line."""
        self._leaves.check()
        leaves = {block for block in self._ages if self._index.children(block) == 0}
        assert set(self._leaves) == leaves, "other blocks can go than the evictable leaves"

    def __len__(self) -> int:
        return len(self._ages)

    def __iter__(self) -> Iterator[BlockId]:
        return iter(self._ages)

    def __contains__(self, block: BlockId) -> bool:
        return block in self._ages

    def _key(self, block: BlockId) -> float:
        return self._ages[block] + self._worth(block)

    def _worth(self, block: BlockId) -> float:
        """Operations saved by chance, over the bytes of the blocks that save nothing without this one."""
        index, costs, block_hash = self._index, self._costs, self._index.hash_of(block)
        if self._snapshots is None:
            depth, uses = index.depth(block_hash), index.hits(block_hash)
            return costs.block_flops(depth - 1, depth) * chance(uses, is_continued=False) / max(1, costs.block_bytes)
        edge = self._snapshots.edge(block_hash)
        if edge is None:
            return 0.0
        blocks, saved = edge
        return saved / max(1, blocks * costs.block_bytes)
