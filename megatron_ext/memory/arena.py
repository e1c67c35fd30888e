"""Arena of slabs that KV blocks and snapshots share: slab sizes that suit both, equal in number on all ranks.

A slab holds a few blocks or a few snapshots. Blocks lie page first: a block has the keys and values of all attention
layers together. A snapshot is one record of all recurrent layers. After the slabs come the blocks of a part of a slab,
the dummy block and the apart slots (see `SlabLayout`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megatron_ext.prefix_cache.slab_layout import SlabLayout

ALIGNMENT = 64  # bytes: of blocks and records in the arena, and of each layer's states in a record
SMALL_WASTE = 0.05  # of a slab; the smallest slab that wastes no more is taken
MAX_WASTE = 0.25  # of a slab, on any rank; with more the split is fixed
MAX_PARTS = 8  # the smaller of blocks and snapshots in a slab
MIN_SLABS = 4  # with fewer the split is fixed


def aligned(count: int, alignment: int = ALIGNMENT) -> int:
    """Round `count` bytes up to a multiple of `alignment`."""
    return -(-count // alignment) * alignment


@dataclass(frozen=True)
class ArenaBudget:
    """Contribution of one rank to an arena, in bytes.

    Attributes:
        total: Bytes of a fixed split: blocks and the dummy block, snapshots and apart slots.
        block: Bytes of one block.
        record: Bytes of one snapshot as a record; see `StateShape.record_bytes`.
        beside_block: Bytes of one block in pools beside the arena, which have as many: those of layers that draft, and
            log-probs.
        apart_slots: Slots beside those of snapshots; see `SlabLayout.first_apart_slot`.
    """

    total: int
    block: int
    record: int
    beside_block: int
    apart_slots: int

    def slab_bytes(self, blocks: int, snapshots: int) -> int:
        """Return the bytes of a slab of so many blocks or snapshots."""
        needed = max(blocks * self.block, snapshots * self.record)
        return aligned(needed, ALIGNMENT * math.lcm(blocks, snapshots))

    def waste(self, blocks: int, snapshots: int) -> float:
        """Return the unused share of a slab, of blocks or of snapshots, whichever is larger."""
        return 1 - min(blocks * self.block, snapshots * self.record) / self.slab_bytes(blocks, snapshots)

    def slabs(self, blocks: int, snapshots: int) -> int:
        """Return how many slabs fit, besides the dummy block and the apart slots."""
        layout, size = SlabLayout(1, blocks, snapshots), self.slab_bytes(blocks, snapshots)
        rest = arena_bytes(layout, size, self.apart_slots) - size + self.beside_block
        return max(0, self.total - rest) // (size + blocks * self.beside_block)

    def spare_blocks(self, layout: SlabLayout) -> int:
        """Return how many blocks fit after the slabs, fewer than fill one."""
        size = self.slab_bytes(layout.blocks_per_slab, layout.snapshots_per_slab)

        def needed(spare: int) -> int:
            with_spare = replace(layout, spare_blocks=spare)
            return arena_bytes(with_spare, size, self.apart_slots) + (with_spare.blocks + 1) * self.beside_block

        return next(spare for spare in reversed(range(layout.blocks_per_slab)) if needed(spare) <= self.total)


def arena_bytes(layout: SlabLayout, slab_bytes: int, apart_slots: int) -> int:
    """Return the bytes of an arena with its dummy block and apart slots."""
    return (layout.first_apart_slot + apart_slots) * (slab_bytes // layout.snapshots_per_slab)


def plan_slabs(ranks: Sequence[ArenaBudget]) -> SlabLayout | None:
    """Return the layout that all ranks use; None if too much of a slab would be unused on some rank, or slabs are few.

    The rank with the smallest capacity decides, since every request has its blocks and snapshots on all ranks.
    """
    best, smallest = None, 1.0
    for blocks, snapshots in sorted({sizes for rank in ranks for sizes in _candidates(rank)}):
        waste = max(rank.waste(blocks, snapshots) for rank in ranks)
        if waste < smallest:
            best, smallest = (blocks, snapshots), waste
        if waste <= SMALL_WASTE:
            break
    if best is None or smallest > MAX_WASTE:
        return None
    slabs = min(rank.slabs(*best) for rank in ranks)
    if slabs < MIN_SLABS:
        return None
    layout = SlabLayout(slabs, *best)
    return replace(layout, spare_blocks=min(rank.spare_blocks(layout) for rank in ranks))


def _candidates(rank: ArenaBudget) -> Iterator[tuple[int, int]]:
    """Yield numbers of blocks and snapshots for a slab that blocks fill: a few snapshots, or a few blocks."""
    for parts in range(1, MAX_PARTS + 1):
        yield -(-parts * rank.record // rank.block), parts
        yield parts, max(1, parts * rank.block // rank.record)
