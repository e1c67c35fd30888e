"""Audits of hits: cached entries to compare with what a request that does not use the cache computes (EX-15)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_ext.prefix_cache.block_pool import BlockId
from megatron_ext.prefix_cache.cache import PrefixCache
from megatron_ext.prefix_cache.hash_chain import BlockHash
from megatron_ext.prefix_cache.state_index import SlotId
from megatron_ext.scheduling.running_slots import RunningSlot

if TYPE_CHECKING:
    from megatron_ext.scheduling.chunk import Chunk


@dataclass(frozen=True)
class AuditTarget:
    """Cached entries that a hit has used.

    Attributes:
        block_hashes: Hashes of the matched blocks, from the start of the sequence.
        resume: Position of the snapshot that the hit resumed from; 0 without recurrent layers.
    """

    block_hashes: tuple[BlockHash, ...]
    resume: int = 0


@dataclass(frozen=True)
class Comparison:
    """Cached entries that a step compares with its audit's own, computed up to the end of its chunk.

    Attributes:
        first: Index of the first pair's block in the sequence.
        blocks: Pairs of a computed block and the cached one; they end where nothing is cached any more.
        states: Running state slot and the slot of the snapshot at the end of the chunk; None without a snapshot.
        are_all_cached: False if a block that the chunk completed is cached no more.
    """

    first: int
    blocks: tuple[tuple[BlockId, BlockId], ...]
    states: tuple[RunningSlot, SlotId] | None
    are_all_cached: bool


@dataclass(frozen=True)
class Differences:
    """Result of a comparison: the largest difference over the largest value computed, within any one layer.

    Attributes:
        comparison: Entries that were compared.
        blocks: Difference of each pair of blocks.
        states: Difference of the states; None if they were not compared.
        bound: Largest difference that rounding explains, for the type of the parameters.
    """

    comparison: Comparison
    blocks: tuple[float, ...]
    states: float | None
    bound: float


def compare_with_cache(chunks: Iterable[Chunk], cache: PrefixCache, block_size: int) -> Comparison | None:
    """Return the comparison of a step's audit: with blocks that its chunk completes, and the snapshot there.

    A scheduler has one audit at a time; without one in the step, nothing is compared.
    """
    for chunk in chunks:
        if (target := chunk.request.audit) is not None:
            first, last = chunk.start // block_size, chunk.end // block_size
            cached = cache.match(target.block_hashes[:last])[first:]
            computed = chunk.request.block_table[first:last]
            pairs = tuple(zip(computed, cached, strict=False))
            states = _states(chunk, target, cache, block_size)
            return Comparison(first, pairs, states, are_all_cached=len(cached) == last - first)
    return None


def _states(
    chunk: Chunk, target: AuditTarget, cache: PrefixCache, block_size: int
) -> tuple[RunningSlot, SlotId] | None:
    running = chunk.request.running_slot
    if not target.resume or chunk.end != target.resume or cache.states is None or running is None:
        return None
    slot = cache.states.find(target.block_hashes[target.resume // block_size - 1])
    return None if slot is None else (running, slot)
