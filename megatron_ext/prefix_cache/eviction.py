"""What goes first when memory is needed: of blocks and of snapshots, by one policy.

The contract for snapshots is `SnapshotOrder`. That for blocks (`EvictionPolicy`), for the cache that calls it, in which
they come and go in runs:

- `keeps_unused`: whether a block that nobody uses, and nobody waits for, stays cached.
- `hold(blocks)`: nobody uses these cached blocks any more, and they stay cached: because of `keeps_unused`, or because
  a waiting request is to find them. Blocks of one sequence come from its end to its start.
- `reuse(blocks)`: evictable blocks are in use again.
- `evict(count)`: the evictable blocks to give up now, the first one first, each after all cached ones that continue it;
  they leave the index at once.
- `on_snapshot_removed(block hash)`: the block of `block_hash` stays, or has just gone, and its snapshot is not there
  any more.
- `len(policy)`: evictable blocks, the most that `evict` can be asked for.

An eviction costs O(log n), on average over many.
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
    """See the module."""

    keeps_unused: bool

    def hold(self, blocks: Iterable[BlockId]) -> None:
        """Nobody uses them, and they stay cached."""

    def reuse(self, blocks: Iterable[BlockId]) -> None:
        """They are in use again."""

    def evict(self, count: int) -> list[BlockId]:
        """The next victims."""

    def on_snapshot_removed(self, block_hash: BlockHash) -> None:
        """The block of `block_hash` has no snapshot any more."""

    def clear(self) -> None:
        """No block is evictable any more."""

    def check(self) -> None:
        """Assert its invariants."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[BlockId]: ...

    def __contains__(self, block: BlockId) -> bool: ...


class LeafFirstLru:
    """Least recently used first, and never a block before those that continue it.

    A plain queue does both: whoever uses a block uses everything before it in the sequence too, so a block never
    becomes evictable later than its parent, and within one sequence the end does so first. The oldest block is
    therefore a leaf.
    """

    keeps_unused = True

    def __init__(self) -> None:
        self._evictable: OrderedDict[BlockId, None] = OrderedDict()

    def hold(self, blocks: Iterable[BlockId]) -> None:
        """Keep them, as the most recently used."""
        assert self._evictable.keys().isdisjoint(blocks), f"one of {blocks} made evictable twice"
        evictable = self._evictable
        for block in blocks:  # three times as fast as `update`
            evictable[block] = None

    def reuse(self, blocks: Iterable[BlockId]) -> None:
        """In use again."""
        for block in blocks:
            del self._evictable[block]

    def evict(self, count: int) -> list[BlockId]:
        """Those that became evictable first."""
        return [self._evictable.popitem(last=False)[0] for _ in range(count)]

    def on_snapshot_removed(self, block_hash: BlockHash) -> None:
        """Of no concern."""

    def clear(self) -> None:
        """Forget all."""
        self._evictable.clear()

    def check(self) -> None:
        """There is nothing that could be wrong with a queue alone."""

    def __len__(self) -> int:
        return len(self._evictable)

    def __iter__(self) -> Iterator[BlockId]:
        return iter(self._evictable)

    def __contains__(self, block: BlockId) -> bool:
        return block in self._evictable


class RefZero(LeafFirstLru):
    """A block is dropped as soon as nobody uses it or waits for it: only requests that overlap in time share."""

    keeps_unused = False


@dataclass(frozen=True)
class Policies:
    """What one name stands for: which blocks go first, and which snapshots."""

    blocks: EvictionPolicy
    snapshots: SnapshotOrder


def build_policies(
    name: EvictionPolicyName, index: BlockIndex, costs: EntryCosts, *, has_states: bool = False
) -> Policies:
    """Fresh ones.

    Args:
        name: Of the policy.
        index: Of the blocks: how deep they are, and which continue which.
        costs: What entries save, and what they take.
        has_states: Whether the model has recurrent layers.
    """
    if name is EvictionPolicyName.FLOPS:
        snapshots = FlopsSnapshots(index, costs)
        return Policies(FlopsBlocks(index, costs, snapshots if has_states else None), snapshots)
    return Policies(LeafFirstLru() if name is EvictionPolicyName.LRU else RefZero(), LruSnapshots())
