"""From matched blocks to the one position where computing begins: every clamp is here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ext.prefix_cache.hash_chain import Digest
from megatron_ext.prefix_cache.state_index import SlotId, StateIndex


@dataclass(frozen=True)
class Restore:
    """The snapshot that a request resumes from; the digest says of which tokens, and is checked when it is copied."""

    digest: Digest
    slot: SlotId


@dataclass(frozen=True)
class ResumePoint:
    """Tokens below `position` need not be computed; `restore` is None where no states are needed."""

    position: int
    restore: Restore | None = None


def resume_position(length: int, matched_tokens: int) -> int:
    """Tokens of a sequence of `length` that need not be computed, in a model without recurrent layers.

    The last token is always computed, because the next one is sampled from its logits; if its block is shared, its KV
    is not written.

    Args:
        length: Known tokens, at least 1.
        matched_tokens: Tokens in the run of cached blocks from the start.
    """
    return min(matched_tokens, length - 1)


def last_boundary(length: int, block_size: int) -> int:
    """The last end of a block that leaves at least one token of `length` to compute."""
    return (length - 1) // block_size * block_size


def resume_point(length: int, matched: Sequence[Digest], block_size: int, states: StateIndex | None) -> ResumePoint:
    """Where to begin a sequence of `length` tokens whose first blocks, `matched`, are cached.

    With recurrent layers (`states` is not None) this is the last block boundary below the end that has a snapshot: one
    that has none is no candidate, however the position is clamped.
    """
    if states is None:
        return ResumePoint(resume_position(length, len(matched) * block_size))
    for blocks in range(min(len(matched), last_boundary(length, block_size) // block_size), 0, -1):
        digest = matched[blocks - 1]
        slot = states.find(digest)
        if slot is not None:
            return ResumePoint(blocks * block_size, Restore(digest, slot))
    return ResumePoint(0)
