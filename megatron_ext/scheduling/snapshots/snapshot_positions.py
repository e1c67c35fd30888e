"""Positions of a sequence at which the states are worth a snapshot."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

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
    """Snapshots planned for a request along its sequence.

    Attributes:
        opportunistic: Positions of opportunistic checkpoints of the whole prompt, in order of priority.
        decode: Block hash of the last snapshot planned in decode; None if no such snapshot exists.
        used: Block hashes of the ordinary snapshots that the request resumed from or takes.
        end_on_disk: Blocks from its start that memory and disk had together before its admission; 0 if memory had all.
    """

    opportunistic: tuple[int, ...] = ()
    decode: BlockHash | None = None
    used: list[BlockHash] = field(default_factory=list)
    end_on_disk: int = 0

    def cached_end(self, matched: int) -> int:
        """Return the end, in blocks, of the cached run of a request that matches `matched` blocks in memory.

        There it diverges from the sequence that wrote the run, whether the run's end was evicted meanwhile or not.
        """
        return max(matched, self.end_on_disk)


def prefill_positions(start: int, end: int, length: int, cached_end: int, block_size: int) -> list[int]:
    """Return block boundaries in (start, end] at which a prefill should leave its states (HY-4), the most useful first.

    The boundaries are: the end of the cached run, because the request that wrote it and this one diverge there, and
    others may; the last boundary before the end of the sequence, so that the same prompt can resume; and the end itself
    if it is a boundary, for sequences that continue it.

    Args:
        start: Position of the first token of the chunk that is computed now.
        end: Position after the last token of the chunk.
        length: Tokens of the whole sequence to prefill.
        cached_end: Tokens in the run of cached blocks, those on disk included, that the request was admitted with.
        block_size: Tokens of a block.
    """
    return [position for position in prefill_stops(length, cached_end, block_size) if start < position <= end]


def prefill_stops(length: int, cached_end: int, block_size: int) -> list[int]:
    """Return the positions of `prefill_positions` in the whole sequence."""
    wanted = [cached_end, last_boundary(length, block_size)]
    if length % block_size == 0:
        wanted.append(length)
    return list(dict.fromkeys(wanted))


def max_snapshots(length: int, block_size: int, *, is_aligned: bool) -> int:
    """Return the maximum number of snapshots of a prompt of `length` tokens, including the one of its decode (LA-4).

    Prefills leave snapshots at `prefill_stops`. With aligned chunks a chunk can end at any boundary, depending on the
    other requests in the batch.
    """
    boundaries = length // block_size
    return (boundaries if is_aligned else min(3, boundaries)) + 1


def cut_aligned(start: int, end: int, length: int, stops: Sequence[int], block_size: int) -> int:
    """Return the latest end of a chunk [start, end) if only the ends of chunks leave snapshots (LA-1).

    The result is the next of `stops`, or else the last boundary in reach; the end of the sequence counts as a boundary.
    A chunk that reaches no boundary, because decodes and older prefills leave it less than a block, ends inside a block
    and leaves no snapshot; a later chunk returns to the grid. (To keep room for a whole block instead, decodes would
    have to wait; if they did so in every other step, that would take as many steps or more.)

    Args:
        start: Position of the first token, on the block grid or inside a block.
        end: Position where the chunk would end without alignment.
        length: Tokens of the whole sequence to prefill.
        stops: Positions where snapshots are wanted; block boundaries.
        block_size: Tokens of a block.
    """
    end = min([end, *(stop for stop in stops if stop > start)])
    boundary = end // block_size * block_size
    return boundary if end < length and boundary > start else end


def common_blocks(one: Sequence[BlockHash], other: Sequence[BlockHash]) -> int:
    """Return the number of blocks that two sequences have in common from their start.

    Block hashes are chained: two that differ have different successors, so that bisection finds the divergence.
    """
    return bisect_left(range(min(len(one), len(other))), True, key=lambda block: one[block] != other[block])
