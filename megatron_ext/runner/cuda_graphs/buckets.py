"""Buckets: the sizes that steps are padded to, and the reasons why a step runs eagerly.

A graph is captured for each bucket: a number of decode rows, a number of prefills and their tokens, and a width of the
block tables. All bounds on the host follow from the bucket, so two steps of one bucket differ only in the contents of
the static buffers.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ext.config.batching import MIXED_STEPS
from megatron_ext.ops.chunked import ChunkGrid
from megatron_ext.runner.input_writer import cut_chunk
from megatron_ext.scheduling.plan import SchedulerLimits
from megatron_ext.scheduling.step import ScheduledChunk, ScheduledStep

CUTS = 3
"""States that one prefill may be cut at inside a step, beside its end."""
COPIES = 4
"""Live states that a decode step copies into snapshots itself; further ones are copied after the step."""
MAX_LISTED = 20
"""Best tokens that a captured step lists for each row, as many as OpenAI's interface has at most."""


@dataclass(frozen=True, order=True)
class Bucket:
    """Sizes of one captured graph.

    Attributes:
        decodes: Rows that decode, R; at least 1.
        prefills: Rows that prefill, S.
        tokens: Tokens of all prefills together.
        blocks: Width of the block table.
    """

    decodes: int
    prefills: int
    tokens: int
    blocks: int

    @property
    def rows(self) -> int:
        """Number of rows, R + S."""
        return self.decodes + self.prefills

    @property
    def num_tokens(self) -> int:
        """Tokens on the packed axis."""
        return self.decodes + self.tokens

    def grid(self, kernel_chunk: int) -> ChunkGrid:
        """Return the grid that holds the kernel chunks of the prefills."""
        places = min(kernel_chunk, self.tokens)
        return ChunkGrid(self.prefills, -(-self.tokens // places) + CUTS, places, self.tokens)

    @property
    def snapshots(self) -> int:
        """Maximum number of states kept inside prefills."""
        return self.prefills * (CUTS + 1)

    @property
    def copies(self) -> int:
        """Maximum number of running states copied into snapshots."""
        return min(self.decodes, COPIES) + self.prefills


class Buckets:
    """Buckets of an engine.

    Args:
        limits: Limits of the engine's scheduler.
        count: Maximum number of decode batch sizes; more than the state slots are of no use.
        kernel_chunk: Tokens that a recurrent layer processes together.
        snapshots_in_prefill: True if mixers keep states inside a prefill.
        one_width: True if every block table is as wide as the longest, as one graph for all lengths needs; otherwise
            widths double, for operators that compute as many keys as fit in the table.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        count: int,
        kernel_chunk: int,
        *,
        snapshots_in_prefill: bool,
        one_width: bool,
    ) -> None:
        self.sizes = decode_sizes(limits.max_requests, count)
        self.widths = _widths(limits.blocks_for(limits.max_model_len), one_width=one_width)
        self.mixed = tuple(one for one in MIXED_STEPS if sum(one) <= limits.max_tokens)
        self._kernel_chunk = kernel_chunk
        self._snapshots_in_prefill = snapshots_in_prefill

    def all(self) -> list[Bucket]:
        """Return all buckets, the largest first: the memory of a larger one suffices for the others."""
        width_first = [
            Bucket(decodes, prefills, tokens, blocks)
            for blocks in self.widths
            for prefills, tokens in ((0, 0), *self.mixed)
            for decodes in self.sizes
        ]
        return sorted(width_first, key=lambda one: (one.num_tokens, one.blocks), reverse=True)

    def find(self, step: ScheduledStep) -> Bucket | None:
        """Return the smallest bucket that holds a step; None if no bucket does."""
        decodes, prefills = step.chunks[: step.num_decode], step.chunks[step.num_decode :]
        size = _at_least(self.sizes, max(1, len(decodes)))
        width = _at_least(self.widths, max(len(chunk.block_ids) for chunk in step.chunks))
        if size is None or width is None:
            return None
        if not prefills:
            return Bucket(size, 0, 0, width)
        tokens = sum(chunk.length for chunk in prefills)
        for count, maximum in self.mixed:
            rest = count - len(prefills)
            bucket = Bucket(size, count, maximum, width)
            if rest >= 0 and tokens + rest <= maximum and self._holds_cuts(prefills, bucket):
                return bucket
        return None

    def _holds_cuts(self, prefills: Sequence[ScheduledChunk], bucket: Bucket) -> bool:
        grid = bucket.grid(self._kernel_chunk)
        kept = sum(len(chunk.snapshots) for chunk in prefills)
        inside = self._snapshots_in_prefill
        cuts = [cut_chunk(chunk, self._kernel_chunk, snapshots_in_prefill=inside) for chunk in prefills]
        return kept <= bucket.snapshots and all(len(cut) <= grid.chunks for cut in cuts)


def why_eager(step: ScheduledStep) -> str | None:
    """Return the feature of a step that no captured graph supports; None if graphs support the step.

    Step sizes are checked separately, see `Buckets.find`.
    """
    if any(chunk.target_sampling for chunk in step.chunks):
        return "drafts are verified"
    if any(chunk.restore is not None for chunk in step.chunks[: step.num_decode]):
        return "a decode restores states after rejected drafts"
    if any(chunk.scoring is not None for chunk in step.chunks):
        return "log-probs of prompts"
    for sampling in (chunk.sampling for chunk in step.chunks):
        if sampling is None:
            continue
        if sampling.top_n is not None and sampling.top_n > MAX_LISTED:
            return f"log-probs of more than {MAX_LISTED} best tokens"
    return None


def decode_sizes(maximum: int, count: int) -> tuple[int, ...]:
    """Return at most `count` evenly spaced decode batch sizes up to `maximum`, the most rows that run at once.

    >>> decode_sizes(16, 4)
    (4, 8, 12, 16)
    >>> decode_sizes(3, 16)
    (1, 2, 3)
    """
    count = min(count, maximum)
    return tuple(sorted({-(-maximum * (i + 1) // count) for i in range(count)}))


def _widths(maximum: int, *, one_width: bool) -> tuple[int, ...]:
    """Return the widths of block tables: `maximum` alone, or widths that double up to `maximum`."""
    found = {maximum}
    while not one_width and maximum > 1:
        maximum = -(-maximum // 2)
        found.add(maximum)
    return tuple(sorted(found))


def _at_least(sizes: Sequence[int], number: int) -> int | None:
    place = bisect.bisect_left(sizes, number)
    return sizes[place] if place < len(sizes) else None
