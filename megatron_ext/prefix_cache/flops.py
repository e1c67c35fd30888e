"""Eviction policy `flops`: compute that an entry saves for the bytes it takes, against its age.

The criterion of Marconi (MLSys 2025), in the form of GreedyDual (Cao and Irani, 1997; with frequencies, Cherkasova,
1998): a memory has an *age*, and an entry has the priority

    age at its last use + worth,        worth = operations saved / bytes * chance of being used again

The entry of lowest priority is evicted, and its priority becomes the age. So an entry of twice the worth survives
twice as much unused traffic, and the weight of worth against age follows from the load. Ages are worths, not times:
they move with evictions only, so that all ranks agree.

**Operations saved** count from the previous snapshot, which would serve instead, to the entry's end: this stretch is
the entry's edge. If the previous snapshot is evicted, the edge grows; the priority is recomputed when it comes up.

**Chance.** The states at the end of a turn that was continued, so that the next turn left its own, only serve users who
go back and edit. An entry that several requests resumed from is likely to serve more.

**Bytes** are those of the memory that is short: a snapshot is charged for its slot, and a block for blocks. If both
share one memory, they have one age, too, and the entry of lowest priority goes, whichever it is. Only leaf blocks can
be evicted. With recurrent layers a leaf is worth its snapshot, divided by
all blocks of the edge, which save nothing without it, computed when it was queued or lost its snapshot (a longer edge
saves about as much per block). A leaf without a snapshot has its age alone: it still shows where requests diverge.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_ext.config.costs import EntryCosts
from megatron_ext.prefix_cache.aged_queue import AgedQueue
from megatron_ext.prefix_cache.block_index import BlockIndex
from megatron_ext.prefix_cache.block_pool import BlockId
from megatron_ext.prefix_cache.hash_chain import BlockHash
from megatron_ext.prefix_cache.snapshot_order import Rank

CONTINUED_CHANCE = 0.5  # that the next request resumes from a snapshot which a later one continues


def chance(uses: int, *, is_continued: bool) -> float:
    """Return how likely another request uses an entry that `uses` requests have used, as a factor."""
    if is_continued and uses < 2:
        return CONTINUED_CHANCE
    return 1.0 + math.log2(1 + uses)


@dataclass
class Age:
    """Age of a memory: the highest priority of an entry evicted so far."""

    value: float = 0.0


@dataclass(eq=False)
class _Snapshot:
    """Snapshot in the order; after its eviction, later snapshots of its sequence still refer to it."""

    block_hash: BlockHash
    depth: int  # blocks
    rank: Rank
    below: _Snapshot | None  # the previous one of its sequence, at its last use
    age: float  # age of the slots at its last use
    uses: int = 0
    is_continued: bool = False
    is_indexed: bool = True

    def base(self) -> int:
        """Return the depth, in blocks, of the last previous snapshot that still exists; 0 without one."""
        while self.below is not None and not self.below.is_indexed:
            self.below = self.below.below
        return 0 if self.below is None else self.below.depth


class FlopsSnapshots:
    """Order of snapshots by the `flops` policy; the contract is that of `SnapshotOrder`.

    Args:
        index: Index of the blocks at whose ends the snapshots are.
        costs: Costs of blocks and states.
        age: Age of the memory; that of the blocks if both share one.
    """

    def __init__(self, index: BlockIndex, costs: EntryCosts, age: Age | None = None) -> None:
        self._index, self._costs = index, costs
        self._snapshots: dict[BlockHash, _Snapshot] = {}
        self._queues: dict[Rank, AgedQueue[BlockHash]] = {rank: AgedQueue() for rank in Rank}
        self._age = Age() if age is None else age

    def add(self, block_hash: BlockHash, rank: Rank) -> None:
        """Add a snapshot at the current age; the previous one of its sequence counts as continued."""
        below = self._before(block_hash)
        self._snapshots[block_hash] = _Snapshot(block_hash, self._index.depth(block_hash), rank, below, self._age.value)
        self._put(block_hash)
        if below is not None and not below.is_continued:
            below.is_continued = True
            self._put(below.block_hash)

    def use(self, block_hash: BlockHash) -> None:
        """Note that a request resumes from a snapshot: it becomes an ordinary one, used at the current age."""
        snapshot = self._snapshots[block_hash]
        self._queues[snapshot.rank].discard(block_hash)
        snapshot.rank, snapshot.below, snapshot.age = Rank.ORDINARY, self._before(block_hash), self._age.value
        snapshot.uses += 1
        self._put(block_hash)

    def remove(self, block_hash: BlockHash) -> None:
        """Remove a snapshot."""
        snapshot = self._snapshots.pop(block_hash)
        snapshot.is_indexed = False
        self._queues[snapshot.rank].discard(block_hash)

    def evict(self, ranks: Sequence[Rank]) -> BlockHash | None:
        """Evict the snapshot of lowest priority among the first of `ranks` that has any."""
        queue = next((self._queues[rank] for rank in ranks if self._queues[rank]), None)
        if queue is None:
            return None
        block_hash, key = queue.pop(self._key)
        self._age.value = max(self._age.value, key)
        self._snapshots.pop(block_hash).is_indexed = False
        return block_hash

    def first(self, rank: Rank) -> tuple[float, BlockHash] | None:
        """Return the snapshot of `rank` with the lowest priority, and that priority; None without one."""
        queue = self._queues[rank]
        return queue.first(self._key)[::-1] if queue else None

    def touch(self, block_hash: BlockHash) -> None:
        """Note that an ordinary snapshot was used at the current age."""
        self._snapshots[block_hash].age = self._age.value
        self._put(block_hash)

    def rank(self, block_hash: BlockHash) -> Rank | None:
        """Return the rank of a snapshot; None if it is not in the order."""
        snapshot = self._snapshots.get(block_hash)
        return None if snapshot is None else snapshot.rank

    def edge(self, block_hash: BlockHash) -> tuple[int, float] | None:
        """Return the edge of a snapshot: its length in blocks, and the expected operations saved.

        None if `block_hash` has no snapshot. `FlopsBlocks` divides the operations by the bytes of the blocks.
        """
        snapshot = self._snapshots.get(block_hash)
        if snapshot is None:
            return None
        base = snapshot.base()
        likely = chance(snapshot.uses, is_continued=snapshot.is_continued)
        return snapshot.depth - base, self._costs.block_flops(base, snapshot.depth) * likely

    def by_priority(self) -> list[BlockHash]:
        """Return all snapshots by rank, in each rank those of lowest priority first."""
        return sorted(self._snapshots, key=lambda block_hash: (self._snapshots[block_hash].rank, self._key(block_hash)))

    def clear(self) -> None:
        """Remove all entries."""
        self._snapshots.clear()
        for queue in self._queues.values():
            queue.clear()

    def check(self) -> None:
        """Assert that each snapshot is in the queue of its rank, and that its base is before it."""
        for rank, queue in self._queues.items():
            queue.check()
            assert set(queue) == {block_hash for block_hash, one in self._snapshots.items() if one.rank is rank}
        for snapshot in self._snapshots.values():
            assert snapshot.is_indexed, "a listed snapshot has been removed"
            assert snapshot.base() < snapshot.depth, "a snapshot stands on a later one"

    def __iter__(self) -> Iterator[BlockHash]:
        return iter(self._snapshots)

    def _before(self, block_hash: BlockHash) -> _Snapshot | None:
        """Return the last snapshot before that of `block_hash`, by one look-up for each block between them."""
        snapshots = self._snapshots
        return next((snapshots[one] for one in self._index.ancestors(block_hash) if one in snapshots), None)

    def _put(self, block_hash: BlockHash) -> None:
        self._queues[self._snapshots[block_hash].rank].put(block_hash, self._key(block_hash))

    def _key(self, block_hash: BlockHash) -> float:
        edge = self.edge(block_hash)
        assert edge is not None, "a weighed snapshot has been removed"
        return self._snapshots[block_hash].age + edge[1] / max(1, self._costs.state_bytes)


class FlopsBlocks:
    """Order of evictable blocks by the `flops` policy; the contract is that of `EvictionPolicy`.

    Args:
        index: Index of the blocks.
        costs: Costs of blocks and states.
        snapshots: Order of the snapshots at the ends of blocks; None in a model without recurrent layers.
        age: Age of the memory; that of the snapshots if both share one.
    """

    keeps_unused = True

    def __init__(
        self, index: BlockIndex, costs: EntryCosts, snapshots: FlopsSnapshots | None, age: Age | None = None
    ) -> None:
        self._index, self._costs, self._snapshots = index, costs, snapshots
        self._ages: dict[BlockId, float] = {}  # age at the last use, of evictable blocks
        self._leaves: AgedQueue[BlockId] = AgedQueue()
        self._age = Age() if age is None else age

    def hold(self, blocks: Sequence[BlockId]) -> None:
        """Make cached blocks evictable, as used at the current age; all but the first are parents of others."""
        held = dict.fromkeys(blocks, self._age.value)
        assert self._ages.keys().isdisjoint(held), f"one of {list(held)} made evictable twice"
        self._ages.update(held)
        for leaf in blocks[:1]:
            if not self._index.children(leaf):
                self._leaves.put(leaf, self._key(leaf))

    def reuse(self, blocks: Sequence[BlockId]) -> None:
        """Take blocks out of the order: they are in use again; all but the last are parents of others."""
        ages = self._ages
        for block in blocks:
            del ages[block]
        for leaf in blocks[-1:]:
            self._leaves.discard(leaf)

    def drop(self, block: BlockId) -> None:
        """Take an evictable leaf out of the order, which is about to be removed; its parent may become a leaf."""
        del self._ages[block]
        self._leaves.discard(block)
        parent = self._index.parent(block)
        if parent is not None and parent in self._ages and self._index.children(parent) == 1:
            self._leaves.put(parent, self._key(parent))

    def evict(self, count: int, limit: float = math.inf) -> list[BlockId]:
        """Evict up to `count` leaves, each time the one of lowest priority; its parent may become a leaf."""
        children: dict[BlockId, int] = {}  # of blocks that go now, and are in the index until this is done
        evicted: list[BlockId] = []
        while len(evicted) < count and self._leaves.first()[1] <= limit:
            evicted.append(self._evict(children))
        return evicted

    def next_priority(self) -> float:
        """Return the lowest priority of a leaf."""
        return self._leaves.first()[1] if self._leaves else math.inf

    def move(self, old: BlockId, new: BlockId) -> None:
        """Put `new` in the place of `old`."""
        self._ages[new] = self._ages.pop(old)
        if old in self._leaves:
            self._leaves.rename(old, new)

    def _evict(self, evicted: dict[BlockId, int]) -> BlockId:
        block, key = self._leaves.pop()
        self._age.value = max(self._age.value, key)
        del self._ages[block]
        parent = self._index.parent(block)
        if parent is not None and parent in self._ages:
            evicted[parent] = evicted.get(parent, 0) + 1
            if evicted[parent] == self._index.children(parent):
                self._leaves.put(parent, self._key(parent))
        return block

    def on_snapshot_removed(self, block_hash: BlockHash) -> None:
        """Lower the priority of a leaf that stays without its snapshot."""
        block = self._index.find(block_hash)
        if block is not None and block in self._leaves:
            self._leaves.put(block, self._key(block))

    def by_priority(self) -> list[BlockId]:
        """Return the evictable blocks by priority, as if each were a leaf."""
        return sorted(self._ages, key=self._key)

    def clear(self) -> None:
        """Remove all entries."""
        self._ages.clear()
        self._leaves.clear()

    def check(self) -> None:
        """Assert that the queue holds exactly the evictable leaves."""
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
        """Return the expected operations saved per byte, over the blocks that save nothing without this one."""
        index, costs, block_hash = self._index, self._costs, self._index.hash_of(block)
        if self._snapshots is None:
            depth, uses = index.depth(block_hash), index.hits(block_hash)
            return costs.block_flops(depth - 1, depth) * chance(uses, is_continued=False) / max(1, costs.block_bytes)
        edge = self._snapshots.edge(block_hash)
        if edge is None:
            return 0.0
        blocks, saved = edge
        return saved / max(1, blocks * costs.block_bytes)
