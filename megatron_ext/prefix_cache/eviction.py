"""What goes first when memory is needed: of blocks and of snapshots, by one policy.

The contract for snapshots is `SnapshotOrder`. That for blocks (`EvictionPolicy`), for the cache that calls it:

- `keeps_unused`: whether a block that nobody uses, and nobody waits for, stays cached.
- `make_evictable(block)`: nobody uses the cached `block` any more. Blocks of one sequence become evictable
  from its end to its start.
- `hold(block)`: the same of a block that a waiting request is to find: it stays cached whatever the policy.
- `reuse(block)`: an evictable block is in use again.
- `evict()`: the evictable block to give up now, which no cached block continues; it leaves the index at once.
- `snapshot_gone(digest)`: the block of `digest` stays, or has just gone, and its snapshot is not there any more.
- `len(policy)`: evictable blocks, that is, how many times `evict` can be called.

An eviction costs O(log n), on average over many.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from megatron_ext.config import EvictionPolicyName
from megatron_ext.config.costs import EntryCosts
from megatron_ext.prefix_cache.block_index import BlockIndex
from megatron_ext.prefix_cache.block_pool import BlockId
from megatron_ext.prefix_cache.flops import FlopsBlocks, FlopsSnapshots
from megatron_ext.prefix_cache.hash_chain import Digest
from megatron_ext.prefix_cache.snapshot_order import LruSnapshots, SnapshotOrder


class EvictionPolicy(Protocol):
    """See the module."""

    keeps_unused: bool

    def hold(self, block: BlockId) -> None:
        """The block stays cached."""

    def make_evictable(self, block: BlockId) -> bool:
        """Whether the block stays cached; False drops it at once."""

    def reuse(self, block: BlockId) -> None:
        """An evictable block is in use again."""

    def evict(self) -> BlockId:
        """The next victim."""

    def snapshot_gone(self, digest: Digest) -> None:
        """The block of `digest` has no snapshot any more."""

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

    def hold(self, block: BlockId) -> None:
        """Keep it, as the most recently used."""
        assert block not in self._evictable, f"block {block} made evictable twice"
        self._evictable[block] = None

    def make_evictable(self, block: BlockId) -> bool:
        """Keep it, as the most recently used."""
        self.hold(block)
        return True

    def reuse(self, block: BlockId) -> None:
        """In use again."""
        del self._evictable[block]

    def evict(self) -> BlockId:
        """The one that became evictable first."""
        block, _ = self._evictable.popitem(last=False)
        return block

    def snapshot_gone(self, digest: Digest) -> None:
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

    def make_evictable(self, block: BlockId) -> bool:
        """Drop it."""
        return False


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
