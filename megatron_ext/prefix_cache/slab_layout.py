"""Arena of slabs that KV blocks and snapshots share: which ids lie in which slab.

A slab holds either `blocks_per_slab` KV blocks or `snapshots_per_slab` snapshots. Block ids and snapshot slots are
positions in the arena, so both are linear in memory: block b starts at b times a block's bytes, slot s at s times the
slab's bytes / `snapshots_per_slab`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SlabLayout:
    """Sizes of an arena.

    Attributes:
        slabs: Number of slabs, at least 1.
        blocks_per_slab: KV blocks that fill a slab, at least 1.
        snapshots_per_slab: Snapshots that a slab has room for, at least 1.
        spare_blocks: Blocks after the slabs, fewer than fill one: room for blocks only.
    """

    slabs: int
    blocks_per_slab: int
    snapshots_per_slab: int
    spare_blocks: int = 0

    @property
    def blocks(self) -> int:
        """Number of block ids: blocks if every slab held blocks."""
        return self.slabs * self.blocks_per_slab + self.spare_blocks

    @property
    def snapshot_slots(self) -> int:
        """Number of snapshot slots: snapshots if every slab held snapshots."""
        return self.slabs * self.snapshots_per_slab

    @property
    def dummy_block(self) -> int:
        """Id of the block for K/V that is not to be stored: the first after all others."""
        return self.blocks

    @property
    def first_apart_slot(self) -> int:
        """Id of the first slot after the blocks; ids between the slabs' slots and it lie in spare and dummy blocks.

        Apart slots are those for states after drafts, then one for padding, then those of steps launched ahead.
        """
        return self.snapshot_slots + -(-(self.spare_blocks + 1) * self.snapshots_per_slab // self.blocks_per_slab)

    def slab_of_block(self, block: int) -> int:
        """Return the slab that a block lies in."""
        return block // self.blocks_per_slab

    def slab_of_slot(self, slot: int) -> int:
        """Return the slab that a snapshot slot lies in."""
        return slot // self.snapshots_per_slab
