"""Reuse of cached entries: how many blocks, and how many snapshots, a later prompt contained.

An entry is used again if a later prompt contains the tokens up to its end, whether it is still cached or was evicted
meanwhile. So the shares do not depend on evictions, and say how much an entry of each type is worth: of a block and a
snapshot that were used equally long ago, the entry whose type has the smaller share is less likely to be used.

Entries are counted in periods, which end when as many blocks were stored as the memory holds, at least `MIN_PERIOD`.
The last two periods count.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from megatron_ext.prefix_cache.hash_chain import BlockHash
from megatron_ext.prefix_cache.slab_layout import SlabLayout

MIN_PERIOD = 2**14  # blocks
DAMPING = 0.25  # added to both shares before they are compared: where little is used again, their ratio says little
ASSUMED_SLABS = 8  # slabs whose contents are assumed to have been used again, until more is known


@dataclass
class _Entries:
    """Entries of one type that were stored in a period."""

    stored: int = 0
    unused: set[BlockHash] = field(default_factory=set)

    @property
    def used(self) -> int:
        return self.stored - len(self.unused)


class Reuse:
    """Shares of blocks and snapshots that later prompts contained; all ranks count alike.

    Args:
        layout: Sizes of the memory that both share.
    """

    def __init__(self, layout: SlabLayout) -> None:
        self._layout = layout
        self._period = max(layout.blocks, MIN_PERIOD)
        self._blocks, self._snapshots = [_Entries()], [_Entries()]  # by period, the current one last

    def on_blocks_stored(self, block_hashes: Iterable[BlockHash]) -> None:
        """Count blocks that have been cached, unless they are counted and not used yet."""
        if self._blocks[-1].stored >= self._period:
            for periods in (self._blocks, self._snapshots):
                periods.append(_Entries())
                del periods[:-2]
        self._count(self._blocks, block_hashes)

    def on_snapshot_stored(self, block_hash: BlockHash) -> None:
        """Count a snapshot that has been cached, unless it is counted and not used yet."""
        self._count(self._snapshots, (block_hash,))

    def _count(self, periods: Sequence[_Entries], block_hashes: Iterable[BlockHash]) -> None:
        new = [one for one in block_hashes if not any(one in period.unused for period in periods)]
        periods[-1].stored += len(new)
        periods[-1].unused.update(new)

    def on_prompt(self, block_hashes: Sequence[BlockHash]) -> None:
        """Note that a request has these blocks in its prompt; its own are stored later."""
        for period in (*self._blocks, *self._snapshots):
            period.unused.difference_update(block_hashes)

    @property
    def of_blocks(self) -> float:
        """Share of the blocks that a later prompt contained, more than 0."""
        return self._share(self._blocks, self._layout.blocks_per_slab)

    @property
    def of_snapshots(self) -> float:
        """Share of the snapshots at whose ends a later prompt went on, more than 0."""
        return self._share(self._snapshots, 1)

    @property
    def snapshot_aging(self) -> float:
        """Factor by which a snapshot ages faster than a block."""
        return (self.of_blocks + DAMPING) / (self.of_snapshots + DAMPING)

    def _share(self, periods: Iterable[_Entries], per_slab: int) -> float:
        assumed = ASSUMED_SLABS * per_slab
        return (assumed + sum(one.used for one in periods)) / (assumed + sum(one.stored for one in periods))

    def check(self) -> None:
        """Assert that no entry is counted twice."""
        for periods in (self._blocks, self._snapshots):
            assert all(one.used >= 0 for one in periods), "more entries were used than stored"
            assert len(set().union(*(one.unused for one in periods))) == sum(len(one.unused) for one in periods)
