"""Arena of slabs that KV blocks and snapshots share: slab sizes that suit both, equal in number on all ranks.

A slab holds a snapshot, or as many blocks. Blocks lie page first: a block has the keys and values of all attention
layers together. A snapshot is one record of all recurrent layers. After the slabs come the blocks of a part of a slab,
the dummy block and the apart slots (see `SlabLayout`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ext.prefix_cache.slab_layout import SlabLayout

ALIGNMENT = 64  # bytes: of blocks and records in the arena, and of each layer's states in a record
SMALL_WASTE = 0.05  # of a slab; of sizes that waste no more, the largest is taken, which blocks fill
MAX_WASTE = 0.3  # of a slab, on any rank; with more the split is fixed, as for snapshots of less than 0.7 blocks
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
        beside_block: Bytes of one block in the pools of drafting layers and of log-probs, which lie beside the arena
            and have as many blocks.
        apart_slots: State slots that never hold snapshots; see `SlabLayout.first_apart_slot`.
    """

    total: int
    block: int
    record: int
    beside_block: int
    apart_slots: int

    def slab_bytes(self, blocks: int) -> int:
        """Return the bytes of a slab, which holds `blocks` blocks or one snapshot."""
        return aligned(max(blocks * self.block, self.record), ALIGNMENT * blocks)

    def waste(self, blocks: int) -> float:
        """Return the unused share of a slab, of blocks or of a snapshot, whichever is larger."""
        return 1 - min(blocks * self.block, self.record) / self.slab_bytes(blocks)

    def slabs(self, blocks: int) -> int:
        """Return how many slabs fit, besides the one of spare blocks and the dummy block, and the apart slots."""
        slab = self.slab_bytes(blocks) + blocks * self.beside_block
        return max(0, self.total - slab - self.apart_slots * self.slab_bytes(blocks)) // slab


def arena_bytes(layout: SlabLayout, slab_bytes: int, apart_slots: int) -> int:
    """Return the bytes of an arena with its dummy block and apart slots."""
    return (layout.first_apart_slot + apart_slots) * slab_bytes


def plan_slabs(ranks: Sequence[ArenaBudget]) -> SlabLayout | None:
    """Return the layout that all ranks use; None if too much of a slab would be unused on some rank, or slabs are few.

    The rank with the smallest capacity decides, since every request has its blocks and snapshots on all ranks.
    """
    sizes = {max(1, blocks) for rank in ranks for blocks in (rank.record // rank.block, -(-rank.record // rank.block))}
    wastes = {blocks: max(rank.waste(blocks) for rank in ranks) for blocks in sizes}
    blocks = min(sizes, key=lambda blocks: (max(wastes[blocks], SMALL_WASTE), -blocks))
    slabs = min(rank.slabs(blocks) for rank in ranks)
    return SlabLayout(slabs, blocks, blocks - 1) if wastes[blocks] <= MAX_WASTE and slabs >= MIN_SLABS else None
