"""Eviction policies: the order in which blocks and snapshots are evicted.

The contract for snapshots is `SnapshotOrder`. The contract for blocks is `EvictionPolicy`, called by the cache with
runs of blocks:

- `keeps_unused`: whether a block stays cached that is not in use and that no request waits for.
- `hold(blocks)`: make cached blocks evictable. They are no longer in use, and stay cached because of `keeps_unused`, or
  because a waiting request wants them. Blocks of one sequence come from its end to its start.
- `reuse(blocks)`: take evictable blocks out of the order: they are in use again.
- `evict(count)`: return the evictable blocks to evict now, in order, each after all its cached children; the cache
  removes them from the index at once.
- `on_snapshot_removed(block_hash)`: note that a snapshot is gone; its block stays, or has just been evicted.
- `len(policy)`: number of evictable blocks, the most that `evict` can return.

An eviction costs O(log n), amortized.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from megatron_ext.config import EvictionPolicyName
from megatron_ext.config.costs import EntryCosts
from megatron_ext.prefix_cache.block_index import BlockIndex
from megatron_ext.prefix_cache.block_pool import BlockId
from megatron_ext.prefix_cache.flops import FlopsBlocks, FlopsSnapshots
from megatron_ext.prefix_cache.hash_chain import BlockHash
from megatron_ext.prefix_cache.snapshot_order import LruSnapshots, SnapshotOrder


class EvictionPolicy(Protocol):
    """Order of evictable blocks; the module describes the contract."""

    keeps_unused: bool

    def hold(self, blocks: Iterable[BlockId]) -> None:
        """Make cached blocks evictable, which are no longer in use."""

    def reuse(self, blocks: Iterable[BlockId]) -> None:
        """Take blocks out of the order: they are in use again."""

    def evict(self, count: int) -> list[BlockId]:
        """Remove and return the next `count` blocks to evict."""

    def on_snapshot_removed(self, block_hash: BlockHash) -> None:
        """Note that the block of `block_hash` no longer has a snapshot."""

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
    """

    keeps_unused = True

    def __init__(self) -> None:
        self._evictable: OrderedDict[BlockId, None] = OrderedDict()

    def hold(self, blocks: Iterable[BlockId]) -> None:
        """Make cached blocks evictable, as the most recently used."""
        assert self._evictable.keys().isdisjoint(blocks), f"one of {blocks} made evictable twice"
        evictable = self._evictable
        for block in blocks:  # three times as fast as `update`
            evictable[block] = None

    def reuse(self, blocks: Iterable[BlockId]) -> None:
        """Take blocks out of the queue: they are in use again."""
        for block in blocks:
            del self._evictable[block]

    def evict(self, count: int) -> list[BlockId]:
        """Remove and return the blocks that became evictable first."""
        return [self._evictable.popitem(last=False)[0] for _ in range(count)]

    def on_snapshot_removed(self, block_hash: BlockHash) -> None:
        """Do nothing: snapshots do not change the order."""

    def clear(self) -> None:
        """Empty the queue."""
        self._evictable.clear()

    def check(self) -> None:
        """Do nothing: a queue has no invariants of its own."""

    def __len__(self) -> int:
        return len(self._evictable)

    def __iter__(self) -> Iterator[BlockId]:
        return iter(self._evictable)

    def __contains__(self, block: BlockId) -> bool:
        return block in self._evictable


class RefZero(LeafFirstLru):
    """Drop a block as soon as no request uses it or waits for it: only requests that overlap in time share."""

    keeps_unused = False


@dataclass(frozen=True)
class Policies:
    """Eviction orders that one policy name selects, for blocks and for snapshots."""

    blocks: EvictionPolicy
    snapshots: SnapshotOrder


def build_policies(
    name: EvictionPolicyName, index: BlockIndex, costs: EntryCosts, *, has_states: bool = False
) -> Policies:
    """Build the empty eviction orders of a policy.

    Args:
        name: Name of the policy.
        index: Index of the blocks: their depths and parents.
        costs: Compute that entries save, and bytes that they take.
        has_states: Whether the model has recurrent layers.
    """
    if name is EvictionPolicyName.FLOPS:
        snapshots = FlopsSnapshots(index, costs)
        return Policies(FlopsBlocks(index, costs, snapshots if has_states else None), snapshots)
    return Policies(LeafFirstLru() if name is EvictionPolicyName.LRU else RefZero(), LruSnapshots())
