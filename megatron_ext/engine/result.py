"""Result of computing a step: tokens and scores."""

from __future__ import annotations

import dataclasses
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any

from megatron_ext.scheduling.audit import Differences
from megatron_ext.scheduling.record import TopN
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
