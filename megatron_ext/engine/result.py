"""What computing a step gives."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_ext.scheduling.output import TopN


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
        behind_drafts: Of chunks with drafts the tokens behind each of these, that one among `tokens` behind the last
            known one; `NO_TOKEN` where none could be drawn.
        generated_behind: Scores of these, where asked for.
    """

    tokens: dict[int, int]
    generated: dict[int, Score]
    prompt: dict[int, tuple[Score, ...]]
    failures: dict[int, str]
    sampled: object = None
    behind_drafts: dict[int, tuple[int, ...]] = field(default_factory=dict)
    generated_behind: dict[int, tuple[Score, ...]] = field(default_factory=dict)
