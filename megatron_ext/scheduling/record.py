"""What a user gets of a request that has ended."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from megatron_ext.scheduling.events import Event


class Status(enum.Enum):
    """How a request ended."""

    COMPLETED = enum.auto()
    FAILED = enum.auto()
    ABORTED = enum.auto()


@dataclass(frozen=True)
class RequestRecord:
    """The outcome of one request over its whole life, preemptions included.

    Times are in seconds. Log-probs are natural logarithms; `prompt_log_probs[i]` belongs to prompt token i + 1.
    A top-n entry maps token ids to log-probs. `generated_log_probs` has one entry per generated token.
    """

    request_id: int
    status: Status
    prompt_text: str | None
    prompt_tokens: tuple[int, ...]
    generated_text: str
    generated_tokens: tuple[int, ...]
    finish_reason: str | None  # "stop", "length" or None
    error: str | None
    events: tuple[Event, ...]
    arrival_wall_time: float  # seconds since the epoch
    latency: float
    ttft: float | None  # None if no token came
    step_count: int  # engine steps that computed something for it
    matched_block_count: int
    skipped_prefill_token_count: int
    computed_prefill_token_count: int
    recomputed_token_count: int
    prefill_reasons: dict[str, int]  # reason of EX-2 -> tokens
    prompt_log_probs: tuple[float, ...] | None
    generated_log_probs: tuple[float, ...] | None
    prompt_top_n_log_probs: tuple[dict[int, float], ...] | None
    generated_top_n_log_probs: tuple[dict[int, float], ...] | None
    is_fault: bool = False  # FAILED by an error of ours, not by what was asked

    @property
    def prompt_token_count(self) -> int:
        """Tokens of the prompt as it was submitted."""
        return len(self.prompt_tokens)
