"""Which cached block goes first when memory is needed.

The contract (`EvictionPolicy`), for the cache that calls it:

- `keeps_unused`: whether a block that nobody uses, and nobody waits for, stays cached.
- `make_evictable(block)`: nobody uses the cached `block` any more. Blocks of one sequence become evictable
  from its end to its start.
- `hold(block)`: the same of a block that a waiting request is to find: it stays cached whatever the policy.
- `reuse(block)`: an evictable block is in use again.
- `evict()`: the evictable block to give up now.
- `len(policy)`: evictable blocks, that is, how many times `evict` can be called.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from megatron_ext.config import EvictionPolicyName
from megatron_ext.prefix_cache.block_pool import BlockId


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

    def clear(self) -> None:
        """No block is evictable any more."""

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

    def clear(self) -> None:
        """Forget all."""
        self._evictable.clear()

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


def build_policy(name: EvictionPolicyName) -> EvictionPolicy:
    """A fresh policy."""
    return {EvictionPolicyName.LRU: LeafFirstLru, EvictionPolicyName.REF_ZERO: RefZero}[name]()
