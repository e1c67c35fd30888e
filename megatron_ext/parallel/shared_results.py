"""Results that ranks share: sampled tokens of a replica's last stage for all its ranks, and scores for rank 0.

With `--check-ranks` every rank of a replica compares its step with the others before computing it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from hashlib import blake2b

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, ReduceOp, all_reduce, broadcast

from megatron_ext.engine.executor import Executor
from megatron_ext.engine.result import StepResult
from megatron_ext.errors import RankError
from megatron_ext.scheduling.audit import Comparison, Differences
from megatron_ext.scheduling.step import ScheduledChunk, ScheduledStep

_LEADER = 0
DIGEST_BYTES = 16
_LONGEST_VALUE = 200  # characters, in the message


class SharedExecutor(Executor):
    """Executor that computes this rank's part of a step, if it has one, and returns the whole replica's result.

    All ranks know from the step's message what follows, so it is not announced. m tokens are 8 m bytes; scores are
    pickled, and sent only if a request asked for them or routing is recorded. A check sends 16 bytes to each other
    rank, and the messages themselves if these digests differ.

    Args:
        part: Executor of this rank's part of the model, whose result has tokens on the rank that samples only; None on
            rank 0 for another replica, whose results it receives.
        group: The replica's ranks, and rank 0.
        rank: This rank.
        source: The rank that samples.
        has_routing: Whether results have routing indices.
        checks: Whether ranks compare each step's message, idle steps included; a difference is a `RankError`.
    """

    def __init__(
        self,
        part: Executor | None,
        group: ProcessGroup,
        rank: int,
        source: int,
        *,
        has_routing: bool = False,
        checks: bool = False,
    ) -> None:
        self._part, self._group, self._rank, self._source = part, group, rank, source
        self._has_routing, self._checks = has_routing, checks
        self._count = 0

    def execute(self, step: ScheduledStep) -> StepResult:
        """Compute and share a step; see `Executor.execute`."""
        self._compare(step)
        return self.share(step, StepResult() if self._part is None else self._part.execute(step))

    def idle(self) -> None:
        """Idle for one step, which has no result; see `Executor.idle`."""
        self._compare(None)
        if self._part is not None:
            self._part.idle()

    def share(self, step: ScheduledStep, result: StepResult) -> StepResult:
        """Return the result of a step on every rank; scores on the source and rank 0 only.

        Args:
            step: The computed step.
            result: Result of this rank's part: tokens and scores on the source, and differences in its own layers.
        """
        if self._group.size() == 1:
            return result
        given = result if self._rank == self._source else StepResult()
        yielding = step.yielding
        tokens, target_tokens = self._share_tokens(yielding, given) if yielding else ({}, {})
        if self._source != _LEADER and (self._has_routing or _wants_scores(step)):
            given = self._hand_over(given)
        return dataclasses.replace(
            given,
            tokens=tokens,
            target_tokens=target_tokens,
            graph_rows=result.graph_rows,  # each rank counts its own graphs
            differences=None if step.comparison is None else self._merge(step.comparison, result.differences),
        )

    def _merge(self, comparison: Comparison, own: Differences | None) -> Differences:
        """Return the largest differences that any rank of the replica found in a comparison.

        Args:
            comparison: Comparison of the step.
            own: Differences in the layers of this rank; None on a rank outside of the replica.
        """
        blocks = len(comparison.blocks)
        row = torch.zeros(blocks + 2, dtype=torch.float64)
        if own is not None:
            row[:2] = torch.tensor([own.bound, own.states or 0.0], dtype=torch.float64)
            row[2 : 2 + len(own.blocks)] = torch.tensor(own.blocks, dtype=torch.float64)
        all_reduce(row, ReduceOp.MAX, group=self._group)
        bound, states, *found = row.tolist()
        return Differences(comparison, tuple(found), states if comparison.states is not None else None, bound)

    def _share_tokens(
        self, chunks: Sequence[ScheduledChunk], given: StepResult
    ) -> tuple[dict[int, int], dict[int, tuple[int, ...]]]:
        """Broadcast the token of each chunk that yields one, followed by the target tokens of drafts."""
        names, counts = [chunk.request_id for chunk in chunks], [len(chunk.target_sampling) for chunk in chunks]
        row = torch.zeros(len(names) + sum(counts), dtype=torch.int64)
        if self._rank == self._source:
            target_tokens = [token for name in names for token in given.target_tokens.get(name, ())]
            row = torch.tensor([*(given.tokens[name] for name in names), *target_tokens])
        broadcast(row, self._source, group=self._group)
        tokens, rest = row[: len(names)].tolist(), iter(row[len(names) :].tolist())
        drafted = [(name, count) for name, count in zip(names, counts, strict=True) if count]
        return dict(zip(names, tokens, strict=True)), {n: tuple(itertools.islice(rest, k)) for n, k in drafted}

    def _hand_over(self, given: StepResult) -> StepResult:
        """Send a result with scores from the source to rank 0."""
        results = [given]
        if self._rank == self._source:
            dist.send_object_list(results, _LEADER, group=self._group)
        elif self._rank == _LEADER:
            dist.recv_object_list(results, self._source, group=self._group)
        return results[0]

    def _compare(self, step: ScheduledStep | None) -> None:
        if not self._checks:
            return
        self._count += 1
        own = torch.frombuffer(bytearray(digest(step)), dtype=torch.uint8)
        digests = [torch.empty_like(own) for _ in range(self._group.size())]
        dist.all_gather(digests, own, group=self._group)
        if any(not other.equal(own) for other in digests):
            raise RankError(f"step {self._count}: {self._difference(step)}")

    def _difference(self, step: ScheduledStep | None) -> str:
        """Describe the first difference between ranks; the same text on all ranks."""
        steps: list[ScheduledStep | None] = [None] * self._group.size()
        dist.all_gather_object(steps, step, group=self._group)
        ranks = dist.get_process_group_ranks(self._group)
        rank, other = next(pair for pair in zip(ranks, steps, strict=True) if digest(pair[1]) != digest(steps[0]))
        name, here, there = first_difference(steps[0], other)
        return f"{name or 'the step'} is {here} on rank {ranks[0]} and {there} on rank {rank} (--check-ranks)"


def _wants_scores(step: ScheduledStep) -> bool:
    asked = any(one.sampling is not None and one.sampling.top_n is not None for one in step.yielding)
    return asked or any(one.scoring is not None for one in step.chunks)


def digest(step: ScheduledStep | None) -> bytes:
    """Return the digest of a step's message: equal messages have equal digests in every process."""
    return blake2b(repr(step).encode(), digest_size=DIGEST_BYTES).digest()


def first_difference(one: object, other: object, name: str = "") -> tuple[str, str, str]:
    """Return the dotted name of the first field in which two messages differ, and its values; empty for the whole."""
    parts: list[tuple[str, object, object]] = []
    if dataclasses.is_dataclass(one) and type(one) is type(other):
        names = [field.name for field in dataclasses.fields(one)]
        parts = [(f"{name}.{part}".lstrip("."), getattr(one, part), getattr(other, part)) for part in names]
    elif isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        parts = [(f"{name}[{i}]", *pair) for i, pair in enumerate(zip(one, other, strict=True))]
    for part, here, there in parts:
        if repr(here) != repr(there):
            return first_difference(here, there, part)
    return name, repr(one)[:_LONGEST_VALUE], repr(other)[:_LONGEST_VALUE]
