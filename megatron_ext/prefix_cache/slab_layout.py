"""Arena of slabs that KV blocks and snapshots share: which ids lie in which slab.

A slab holds either `blocks_per_slab` KV blocks or one snapshot. Block ids and snapshot slots are positions in the
arena, so both are linear in memory: slot s is slab s, and block b starts at b times the slab's bytes /
`blocks_per_slab`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SlabLayout:
    """Sizes of an arena.

    Attributes:
        slabs: Number of slabs, and so of snapshots if every slab held one; at least 1.
        blocks_per_slab: KV blocks that fill a slab, at least 1.
        spare_blocks: Blocks after the slabs, fewer than fill one: room for blocks only.
    """

    slabs: int
    blocks_per_slab: int
    spare_blocks: int = 0

    @property
    def blocks(self) -> int:
        """Number of block ids: blocks if every slab held blocks."""
        return self.slabs * self.blocks_per_slab + self.spare_blocks

    @property
    def dummy_block(self) -> int:
        """Id of the block for K/V that is not to be stored: the first after all others."""
        return self.blocks

    @property
    def first_apart_slot(self) -> int:
        """Id of the first slot after the blocks; spare and dummy blocks lie in the slab before it.

        Apart slots hold, in this order, states after drafts, padding, and snapshots of steps launched ahead.
        """
        return self.slabs + 1
