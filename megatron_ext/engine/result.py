"""Results of a step: tokens and scores, committed chunks of each replica and of the engine, output for callers."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from megatron_ext.scheduling.audit import Differences
from megatron_ext.scheduling.chunk import Chunk
from megatron_ext.scheduling.record import RequestRecord, TopN
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.routing_indices import RoutingIndices


@dataclass(frozen=True)
class Score:
    """Log-prob of a token, and its top-n alternatives (empty if not requested)."""

    log_prob: float
    top_n: TopN


@dataclass(frozen=True)
class StepResult:
    """Result of a step's computation, by request id.

    Attributes:
        tokens: Token that each chunk yielded, if it yielded one.
        generated: Scores of these tokens, if requested.
        prompt: Scores of prompt tokens, if requested and computed in this step.
        kept_prompt_log_probs: Log-probs of prompt tokens that were kept with cached blocks; they come before `prompt`.
        failures: Error messages of requests whose scores found no memory.
        target_tokens: Target tokens after each draft of a chunk; the one after the last known token is in `tokens`.
        target_scores: Scores of the target tokens, if requested.
        graph_rows: Rows of the CUDA graph that computed the step, dummy requests included; None for an eager step.
        routing: Routing indices of each chunk's tokens, if they are recorded.
        differences: Differences between cached entries and an audit's recomputation; None without an audit.
    """

    tokens: dict[int, int] = field(default_factory=dict)
    generated: dict[int, Score] = field(default_factory=dict)
    prompt: dict[int, tuple[Score, ...]] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    target_tokens: dict[int, tuple[int, ...]] = field(default_factory=dict)
    target_scores: dict[int, tuple[Score, ...]] = field(default_factory=dict)
    graph_rows: int | None = None
    routing: dict[int, RoutingIndices] = field(default_factory=dict)
    differences: Differences | None = None
    kept_prompt_log_probs: dict[int, list[float]] = field(default_factory=dict)

    def of(self, names: Container[int]) -> StepResult:
        """Return the result for some of the requests only."""
        tables: dict[str, Any] = {
            field: {name: value for name, value in table.items() if name in names}
            for field, table in vars(self).items()
            if isinstance(table, dict)
        }
        return dataclasses.replace(self, **tables)


@dataclass(frozen=True)
class ReplicaStep:
    """One step of a replica.

    Attributes:
        planned: Scheduled chunks.
        result: Computed tokens and scores; None if nothing was scheduled.
    """

    planned: Sequence[Chunk]
    result: StepResult | None

    @cached_property
    def chunks(self) -> Sequence[Chunk]:
        """Scheduled chunks of callers' requests, without audits."""
        return [chunk for chunk in self.planned if chunk.request.audit is None]


@dataclass(frozen=True)
class EngineStep:
    """Committed step whose output has not been processed yet.

    Attributes:
        parts: One step of each replica.
        seconds: Time to plan, execute and commit.
    """

    parts: tuple[ReplicaStep, ...] = ()
    seconds: float = 0.0

    @property
    def chunks(self) -> Sequence[Chunk]:
        """Scheduled chunks of callers' requests in all replicas."""
        return [chunk for part in self.parts for chunk in part.chunks]


@dataclass(frozen=True)
class StepOutput:
    """Outcome of one step.

    Attributes:
        active: Requests that computed a chunk in the step and continue.
        records: Records of all requests that have ended since the last step.
        seconds: Time to plan, execute and commit.
    """

    active: Sequence[Request]
    records: Sequence[RequestRecord]
    seconds: float


def active_requests(step: EngineStep) -> list[Request]:
    """Return the requests of a reported step that continue."""
    return [chunk.request for chunk in step.chunks if not chunk.request.is_ended]
