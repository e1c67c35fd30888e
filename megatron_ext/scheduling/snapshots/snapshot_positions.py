"""At which positions of a sequence the states are worth a snapshot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ext.prefix_cache.hash_chain import BlockHash
from megatron_ext.prefix_cache.matching import last_boundary
from megatron_ext.prefix_cache.state_index import SlotId


@dataclass(frozen=True)
class Snapshot:
    """States after exactly `position` tokens of a request, on their way to a reserved slot."""

    position: int
    block_hash: BlockHash
    slot: SlotId


@dataclass
class SnapshotPlan:
    """What a request leaves on its way.

    Attributes:
        opportunistic: Positions of snapshots that nobody asked for, of the whole prompt; the first goes first.
        decode: The last one that was asked for while decoding.
    """

    opportunistic: tuple[int, ...] = ()
    decode: BlockHash | None = None


def prefill_positions(start: int, end: int, length: int, shared_end: int, block_size: int) -> list[int]:
    """Block boundaries in (start, end] at which a prefill should leave its states (HY-4), the most useful first.

    The end of the matched run, because whoever wrote it and this request part there, and others may; the last boundary
    below the end of the sequence, so that the same prompt can resume; the end itself if it is one, for what continues
    it.

    Args:
        start: First token of the chunk that is computed now.
        end: Behind its last token.
        length: Tokens of the whole sequence to prefill.
        shared_end: Tokens in the run of cached blocks that it was admitted with.
        block_size: Tokens.
    """
    return [position for position in prefill_stops(length, shared_end, block_size) if start < position <= end]


def prefill_stops(length: int, shared_end: int, block_size: int) -> list[int]:
    """The positions of `prefill_positions` in the whole sequence."""
    wanted = [shared_end, last_boundary(length, block_size)]
    if length % block_size == 0:
        wanted.append(length)
    return list(dict.fromkeys(wanted))


def max_snapshots(length: int, block_size: int, *, is_aligned: bool) -> int:
    """The most snapshots that a prompt of `length` tokens can leave, and the one that its decode keeps (LA-4).

    Where `prefill_stops` are. With aligned chunks any boundary can be the end of one, depending on what else is in the
    batch.
    """
    boundaries = length // block_size
    return (boundaries if is_aligned else min(3, boundaries)) + 1


def cut_aligned(start: int, end: int, length: int, stops: Sequence[int], block_size: int) -> int:
    """Where a chunk [start, end) ends at the latest if states are left behind only at the ends of chunks (LA-1).

    That is the next of `stops`, or else the last boundary in reach; the end of the sequence is one as well. A chunk
    that reaches no boundary, because decodes and older prefills leave it less than a block, ends inside one and leaves
    no states; one of those that follow catches up with the grid. (To keep room for a whole block instead, decodes would
    have to wait; if they do so in every other step, that takes as many steps or more.)

    Args:
        start: First token of the chunk, on the block grid or inside a block.
        end: Where it would end without this.
        length: Tokens of the whole sequence to prefill.
        stops: Positions at which states are wanted; block boundaries.
        block_size: Tokens.
    """
    end = min([end, *(stop for stop in stops if stop > start)])
    boundary = end // block_size * block_size
    return boundary if end < length and boundary > start else end


def common_blocks(one: Sequence[BlockHash], other: Sequence[BlockHash]) -> int:
    """Blocks that two sequences have in common from their start.

    Block hashes are chained: two that differ have different successors, so that halving finds where they part.
    """
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[middle - 1] == other[middle - 1] else (low, middle - 1)
    return low
