"""Steps of an engine and what computing them gives."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from megatron_ext.scheduling.record import TopN

Value = TypeVar("Value")


@dataclass(frozen=True)
class Score:
    """The log-prob of a token, and the best alternatives (empty if nobody asked)."""

    log_prob: float
    top_n: TopN


@dataclass(frozen=True)
class StepResult:
    """What a step's computation gave, by request id.

    Attributes:
        tokens: The token that each chunk yielded, if it did.
        generated: Scores of these tokens, where asked for.
        prompt: Scores of prompt tokens, where asked for and computed in this step.
        failures: Requests whose scores found no memory, and the error's words.
        sampled: The tokens where they were computed, for a step that is staged before they are known on the host.
        target_tokens: Of chunks with drafts the tokens behind each of these, that one among `tokens` behind the last
            known one.
        target_scores: Scores of these, where asked for.
    """

    tokens: dict[int, int]
    generated: dict[int, Score]
    prompt: dict[int, tuple[Score, ...]]
    failures: dict[int, str]
    sampled: object = None
    target_tokens: dict[int, tuple[int, ...]] = field(default_factory=dict)
    target_scores: dict[int, tuple[Score, ...]] = field(default_factory=dict)

    def of(self, names: Container[int]) -> StepResult:
        """What it gave to some of the requests."""
        return StepResult(
            tokens=_only(self.tokens, names),
            generated=_only(self.generated, names),
            prompt=_only(self.prompt, names),
            failures=_only(self.failures, names),
            sampled=self.sampled,
            target_tokens=_only(self.target_tokens, names),
            target_scores=_only(self.target_scores, names),
        )


def _only(table: Mapping[int, Value], names: Container[int]) -> dict[int, Value]:
    return {name: value for name, value in table.items() if name in names}
