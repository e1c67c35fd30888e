"""Record of the depths where requests diverged from cached blocks without a requested snapshot there (SI-1)."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from megatron_ext.prefix_cache.block_index import BlockIndex
from megatron_ext.prefix_cache.block_pool import BlockId
from megatron_ext.prefix_cache.state_index import StateIndex

MAX_DIVERGENCES = 512  # kept in the record
_SHOWN_EVERY = 8  # divergences between two updates of `shown`, so that planned snapshots seldom change
MAX_DEPTHS = 64  # the most common depths, shown

Depths = tuple[tuple[int, int], ...]
"""Pairs (blocks from the start, number of sequences that diverged there), ordered by depth."""


class Divergences:
    """Bounded record of divergences, the oldest dropped first; kept across a reset, since the users are the same.

    Attributes:
        shown: Most common depths; replaced as a whole after every few divergences, so that all ranks agree.
    """

    def __init__(self) -> None:
        self._record: deque[int] = deque(maxlen=MAX_DIVERGENCES)
        self._noted = 0
        self.shown: Depths = ()

    def note(self, depth: int) -> None:
        """Record that a request has diverged after `depth` blocks."""
        self._record.append(depth)
        self._noted += 1
        if self._noted % _SHOWN_EVERY == 0:
            commonest = Counter(self._record).most_common(MAX_DEPTHS)  # among equal counts, those noted first
            self.shown = tuple(sorted(commonest))

    def note_match(
        self,
        index: BlockIndex,
        states: StateIndex,
        matched: Sequence[BlockId],
        start: int,
        *,
        is_continued: bool = False,
    ) -> None:
        """Record a divergence, if any, of a request that matches these blocks and resumes after `start` of them.

        A divergence counts if other cached blocks continue the match, and there is no requested snapshot at its end:
        then an opportunistic snapshot would help, or did.

        Args:
            index: Blocks in memory.
            states: Snapshots in memory.
            matched: Blocks of the request in memory, at least one.
            start: Number of them after which it resumes.
            is_continued: Whether blocks on disk continue the match.
        """
        if not is_continued and not index.children(matched[-1]):
            return
        if start < len(matched) or states.is_provisional(index.hash_of(matched[-1])):
            self.note(len(matched))
