"""Eviction policies: the order in which blocks and snapshots are evicted.

The contract for snapshots is `SnapshotOrder`. The contract for blocks is `EvictionPolicy`, called by the cache with
runs of blocks:

- `keeps_unused`: whether a block stays cached that is not in use and that no request waits for.
- `hold(blocks)`: make cached blocks evictable. They are no longer in use, and stay cached because of `keeps_unused`, or
  because a waiting request wants them. They are blocks of one sequence, from its end to its start.
- `reuse(blocks)`: take evictable blocks out of the order: they are in use again. They are blocks of one sequence, from
  its start to its end.
- `drop(block)`: take an evictable block without cached children out of the order; the cache removes it at once.
- `evict(count, limit)`: return the evictable blocks to evict now, in order, each after all its cached children; the
  cache removes them from the index at once. They are fewer than `count` if the next one's priority exceeds `limit`.
- `next_priority()`: return the priority of the block that `evict` would return first, on the scale of `SnapshotOrder`.
- `move(old, new)`: note that the contents of an evictable block are in another block now.
- `on_snapshot_removed(block_hash)`: note that a snapshot is gone; its block stays, or has just been evicted.
- `by_priority()`: return the evictable blocks, the first to evict at the start; a block may precede its children.
- `len(policy)`: number of evictable blocks, the most that `evict` can return.

An eviction costs O(log n), amortized.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count as counting
from typing import Protocol

from megatron_ext.config import EvictionPolicyName
from megatron_ext.config.costs import EntryCosts
from megatron_ext.prefix_cache.block_index import BlockIndex
from megatron_ext.prefix_cache.block_pool import BlockId
from megatron_ext.prefix_cache.flops import Age, FlopsBlocks, FlopsSnapshots
from megatron_ext.prefix_cache.hash_chain import BlockHash
from megatron_ext.prefix_cache.reuse import Reuse
from megatron_ext.prefix_cache.snapshot_order import LruSnapshots, SnapshotOrder


class EvictionPolicy(Protocol):
    """Order of evictable blocks; the module describes the contract."""

    keeps_unused: bool

    def hold(self, blocks: Sequence[BlockId]) -> None:
        """Make cached blocks evictable, which are no longer in use."""

    def reuse(self, blocks: Sequence[BlockId]) -> None:
        """Take blocks out of the order: they are in use again."""

    def drop(self, block: BlockId) -> None:
        """Take a block without cached children out of the order, which is about to be removed."""

    def evict(self, count: int, limit: float = math.inf) -> list[BlockId]:
        """Remove and return the next blocks to evict, at most `count`, with priorities up to `limit`."""

    def next_priority(self) -> float:
        """Return the priority of the next block to evict; infinity without one."""

    def move(self, old: BlockId, new: BlockId) -> None:
        """Put the evictable block `new` in the place of `old`."""

    def on_snapshot_removed(self, block_hash: BlockHash) -> None:
        """Note that the block of `block_hash` no longer has a snapshot."""

    def by_priority(self) -> list[BlockId]:
        """Return the evictable blocks, those of lowest priority first."""

    def clear(self) -> None:
        """Remove all blocks from the order."""

    def check(self) -> None:
        """Assert the invariants of the order."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[BlockId]: ...

    def __contains__(self, block: BlockId) -> bool: ...


class LeafFirstLru:
    """Least recently used block first, and never a block before its children.

    A plain queue does both: a request that uses a block uses all blocks before it in the sequence too, so a block never
    becomes evictable later than its parent, and within one sequence the end does so first. The oldest block is
    therefore a leaf.

    Args:
        clock: Times of uses; that of the snapshots if both share one memory.
    """

    keeps_unused = True

    def __init__(self, clock: Iterator[int] | None = None) -> None:
        self._clock = counting() if clock is None else clock
        self._times: dict[BlockId, int] = {}
        self._queue: OrderedDict[int, BlockId] = OrderedDict()  # by time

    def hold(self, blocks: Sequence[BlockId]) -> None:
        """Make cached blocks evictable, as the most recently used."""
        times, queue = self._times, self._queue
        assert times.keys().isdisjoint(blocks), f"one of {blocks} made evictable twice"
        for block, time in zip(blocks, self._clock):  # noqa: B905  # the clock does not end
            times[block] = time
            queue[time] = block

    def reuse(self, blocks: Sequence[BlockId]) -> None:
        """Take blocks out of the queue: they are in use again."""
        times, queue = self._times, self._queue
        for block in blocks:
            del queue[times.pop(block)]

    def drop(self, block: BlockId) -> None:
        """Take a block out of the queue."""
        self.reuse([block])

    def evict(self, count: int, limit: float = math.inf) -> list[BlockId]:
        """Remove and return the blocks that became evictable first."""
        evicted: list[BlockId] = []
        while len(evicted) < count:
            time, block = self._queue.popitem(last=False)
            if time > limit:
                self._queue[time] = block
                self._queue.move_to_end(time, last=False)
                break
            evicted.append(block)
            del self._times[block]
        return evicted

    def next_priority(self) -> float:
        """Return the time at which the next block became evictable."""
        return next(iter(self._queue), math.inf)

    def move(self, old: BlockId, new: BlockId) -> None:
        """Put `new` in the place of `old`."""
        time = self._times.pop(old)
        self._times[new] = time
        self._queue[time] = new

    def on_snapshot_removed(self, block_hash: BlockHash) -> None:
        """Do nothing: snapshots do not change the order."""

    def by_priority(self) -> list[BlockId]:
        """Return the evictable blocks, the least recently used first."""
        return list(self)

    def clear(self) -> None:
        """Empty the queue."""
        self._times.clear()
        self._queue.clear()

    def check(self) -> None:
        """Assert that the queue is in order of time, and agrees with the times."""
        assert list(self._queue) == sorted(self._queue), "the queue is out of order"
        assert {block: time for time, block in self._queue.items()} == self._times, "a block has two times"

    def __len__(self) -> int:
        return len(self._times)

    def __iter__(self) -> Iterator[BlockId]:
        return iter(self._queue.values())

    def __contains__(self, block: BlockId) -> bool:
        return block in self._times


class RefZero(LeafFirstLru):
    """Drop a block as soon as no request uses it or waits for it: only requests that overlap in time share."""

    keeps_unused = False


@dataclass(frozen=True)
class Policies:
    """Eviction orders that one policy name selects, for blocks and for snapshots."""

    blocks: EvictionPolicy
    snapshots: SnapshotOrder


def build_policies(
    name: EvictionPolicyName,
    index: BlockIndex,
    costs: EntryCosts,
    *,
    has_states: bool = False,
    reuse: Reuse | None = None,
) -> Policies:
    """Build the empty eviction orders of a policy.

    Args:
        name: Name of the policy.
        index: Index of the blocks: their depths and parents.
        costs: Compute that entries save, and bytes that they take.
        has_states: Whether the model has recurrent layers.
        reuse: Shares of blocks and snapshots that are used again, if they share one memory, so that their priorities
            are compared; else None.
    """
    if name is EvictionPolicyName.FLOPS:
        age = Age()
        snapshots = FlopsSnapshots(index, costs, age)
        blocks = FlopsBlocks(index, costs, snapshots if has_states else None, Age() if reuse is None else age)
        return Policies(blocks, snapshots)
    clock = counting()
    order = LeafFirstLru if name is EvictionPolicyName.LRU else RefZero
    return Policies(order(clock), LruSnapshots(clock, reuse))
