"""Which sizes steps are padded to, and why a step is not.

A program is made for a bucket: so many rows that decode, so many prefills with so many tokens, block tables so wide.
All bounds on the host follow from the bucket, so two steps of one bucket differ in what stands in fixed places and in
nothing else.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ext.config.batching import MIXED_STEPS
from megatron_ext.mixers.chunk_metadata import cut_between
from megatron_ext.ops.static_chunks import ChunkGrid
from megatron_ext.scheduling.plan import SchedulerLimits
from megatron_ext.scheduling.step import ScheduledChunk, ScheduledStep

CUTS = 3
"""States that one prefill may be cut at inside a step, beside its end."""
COPIES = 4
"""Live states that a decode step copies into snapshots itself; what is beyond that is copied behind it."""
MAX_LISTED = 20
"""Best tokens that a program lists of each row, as many as OpenAI's interface has at most."""


@dataclass(frozen=True, order=True)
class Bucket:
    """The sizes of a program.

    Attributes:
        decodes: Rows that decode, R; at least 1.
        prefills: Rows that prefill, S.
        tokens: Of all prefills together.
        blocks: Width of the block table.
    """

    decodes: int
    prefills: int
    tokens: int
    blocks: int

    @property
    def rows(self) -> int:
        """R + S."""
        return self.decodes + self.prefills

    @property
    def num_tokens(self) -> int:
        """On the packed axis."""
        return self.decodes + self.tokens

    def grid(self, kernel_chunk: int) -> ChunkGrid:
        """Room for the kernel chunks of the prefills."""
        places = min(kernel_chunk, self.tokens)
        return ChunkGrid(self.prefills, -(-self.tokens // places) + CUTS, places, self.tokens)

    @property
    def snapshots(self) -> int:
        """Room for states inside prefills that are kept."""
        return self.prefills * (CUTS + 1)

    @property
    def copies(self) -> int:
        """Room for live states that are copied into snapshots."""
        return min(self.decodes, COPIES) + self.prefills

    def __str__(self) -> str:
        prefills = f" + {self.prefills} prefills of {self.tokens} tokens" if self.prefills else ""
        return f"{self.decodes} decodes{prefills}, {self.blocks} blocks each"


class Buckets:
    """The buckets of an engine.

    Args:
        limits: Of its scheduler.
        count: Sizes of decode batches at most; more than there are state slots are of no use.
        kernel_chunk: Tokens that a recurrent layer takes together.
        snapshots_in_prefill: Whether mixers keep states inside a prefill.
        one_width: Whether every block table is as wide as the longest, as one program for all lengths needs it;
            otherwise widths double, for operators that compute as many keys as there is room for.
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
        self.widths = _widths(limits.blocks_for(limits.max_sequence_length), one_width=one_width)
        self.mixed = tuple(one for one in MIXED_STEPS if sum(one) <= limits.max_tokens)
        self._kernel_chunk = kernel_chunk
        self._snapshots_in_prefill = snapshots_in_prefill

    def all(self) -> list[Bucket]:
        """Every bucket there is, the largest first: memory that it needs does for the others."""
        width_first = [
            Bucket(decodes, prefills, tokens, blocks)
            for blocks in self.widths
            for prefills, tokens in ((0, 0), *self.mixed)
            for decodes in self.sizes
        ]
        return sorted(width_first, key=lambda one: (one.num_tokens, one.blocks), reverse=True)

    def find(self, step: ScheduledStep) -> Bucket | None:
        """The smallest bucket that holds a step; None if none does."""
        decodes, prefills = step.chunks[: step.num_decode], step.chunks[step.num_decode :]
        size = _at_least(self.sizes, max(1, len(decodes)))
        width = _at_least(self.widths, max(len(chunk.block_ids) for chunk in step.chunks))
        if size is None or width is None:
            return None
        if not prefills:
            return Bucket(size, 0, 0, width)
        tokens = sum(chunk.length for chunk in prefills)
        for count, most in self.mixed:
            rest = count - len(prefills)
            bucket = Bucket(size, count, most, width)
            if rest >= 0 and tokens + rest <= most and self._holds_cuts(prefills, bucket):
                return bucket
        return None

    def _holds_cuts(self, prefills: Sequence[ScheduledChunk], bucket: Bucket) -> bool:
        grid = bucket.grid(self._kernel_chunk)
        kept = sum(len(chunk.snapshots) for chunk in prefills)
        return kept <= bucket.snapshots and all(len(self.cut(chunk, grid)) <= grid.chunks for chunk in prefills)

    def cut(self, chunk: ScheduledChunk, grid: ChunkGrid) -> list[int]:
        """Tokens of each kernel chunk of a prefill."""
        inside = chunk.snapshots if self._snapshots_in_prefill else ()
        return cut_between(chunk.start, chunk.length, grid.places, sorted({one.position for one in inside}))


def why_eager(step: ScheduledStep) -> str | None:
    """What a step asks for that no program computes; None if nothing.

    Sizes are another matter, see `Buckets.find`.
    """
    if any(chunk.target_sampling for chunk in step.chunks):
        return "drafts are verified"
    if any(chunk.restore is not None for chunk in step.chunks[: step.num_decode]):
        return "a decode goes on behind drafts that did not come"
    if any(chunk.scoring is not None for chunk in step.chunks):
        return "log-probs of prompts"
    for sampling in (chunk.sampling for chunk in step.chunks):
        if sampling is None:
            continue
        if sampling.top_n is not None and sampling.top_n > MAX_LISTED:
            return f"log-probs of more than {MAX_LISTED} best tokens"
    return None


def decode_sizes(most: int, count: int) -> tuple[int, ...]:
    """Sizes of decode batches, `count` at most and evenly apart, the largest of them all that may run at once.

    >>> decode_sizes(16, 4)
    (4, 8, 12, 16)
    >>> decode_sizes(3, 16)
    (1, 2, 3)
    """
    count = min(count, most)
    return tuple(sorted({-(-most * (i + 1) // count) for i in range(count)}))


def _widths(most: int, *, one_width: bool) -> tuple[int, ...]:
    """Widths of block tables: all, or doubling up to all."""
    found = {most}
    while not one_width and most > 1:
        most = -(-most // 2)
        found.add(most)
    return tuple(sorted(found))


def _at_least(sizes: Sequence[int], number: int) -> int | None:
    place = bisect.bisect_left(sizes, number)
    return sizes[place] if place < len(sizes) else None
