"""Resume points: the position where computing begins, given the matched blocks. Every clamp is here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_ext.prefix_cache.hash_chain import BlockHash
from megatron_ext.prefix_cache.state_index import SlotId, StateIndex


@dataclass(frozen=True)
class Restore:
    """Snapshot that a request resumes from; its block hash names the tokens and is checked when it is copied."""

    block_hash: BlockHash
    slot: SlotId


@dataclass(frozen=True)
class ResumePoint:
    """First position to compute, and the snapshot to restore (None without recurrent states)."""

    position: int
    restore: Restore | None = None


def resume_position(length: int, matched_tokens: int) -> int:
    """Return the number of tokens that need not be computed, in a model without recurrent layers.

    The last token is always computed, because the next one is sampled from its logits; if its block is shared, its KV
    is not written.

    Args:
        length: Known tokens of the sequence, at least 1.
        matched_tokens: Tokens in the run of cached blocks from the start.
    """
    return min(matched_tokens, length - 1)


def last_boundary(length: int, block_size: int) -> int:
    """Return the last block boundary that leaves at least one token of `length` to compute."""
    return (length - 1) // block_size * block_size


def resume_point(
    length: int,
    matched: Sequence[BlockHash],
    block_size: int,
    states: StateIndex | None,
    depth_of: Callable[[BlockHash], int],
) -> ResumePoint:
    """Return the resume point of a sequence of `length` tokens whose first blocks, `matched`, are cached.

    With recurrent layers (`states` is not None) this is the last block boundary below the end that has a snapshot; a
    boundary without a snapshot is never a candidate, however the position is clamped.

    Args:
        length: Known tokens of the sequence, at least 1.
        matched: Hashes of the sequence's first blocks, all of them cached.
        block_size: Tokens of a block.
        states: Snapshot index of the cache; None in a model without recurrent layers.
        depth_of: Function from a cached block's hash to its depth: blocks from the start of its sequence to its end.
    """
    if states is None:
        return ResumePoint(resume_position(length, len(matched) * block_size))
    max_blocks = min(len(matched), last_boundary(length, block_size) // block_size)
    blocks = _last_with_snapshot(matched, max_blocks, states, depth_of)
    if not blocks:
        return ResumePoint(0)
    block_hash = matched[blocks - 1]
    slot = states.find(block_hash)
    assert slot is not None, "just found"
    return ResumePoint(blocks * block_size, Restore(block_hash, slot))


def _last_with_snapshot(
    matched: Sequence[BlockHash], max_blocks: int, states: StateIndex, depth_of: Callable[[BlockHash], int]
) -> int:
    """Return the number of blocks of `matched`, at most `max_blocks`, up to the last with a snapshot, or 0.

    The snapshot of a prefix in use is near its end, so the search goes backward from there. After as many blocks as
    there are snapshots, it goes over the snapshots instead: the depth of each is its only possible place in `matched`.
    """
    snapshots = states.visible()
    nearest = max(0, max_blocks - len(snapshots))
    for blocks in range(max_blocks, nearest, -1):
        if matched[blocks - 1] in snapshots:
            return blocks
    depths = ((depth_of(block_hash), block_hash) for block_hash in snapshots) if nearest else ()
    return max(
        (depth for depth, block_hash in depths if depth <= nearest and matched[depth - 1] == block_hash), default=0
    )
