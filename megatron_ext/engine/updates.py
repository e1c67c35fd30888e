"""Updates of living requests: made by the engine's thread after each step, read by other threads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.token_versions import Runs, joined


@dataclass(frozen=True)
class Update:
    """New output of a living request since its previous update.

    The prompt's log-probs are complete when the first token comes; they are in the first update only.

    Attributes:
        start: Number of generated tokens in the previous updates.
        skipped_prefill_token_count: See `RequestRecord`.
        prefill_reasons: See `RequestRecord`; empty except in the first update.
        weights_version: See `RequestRecord`; of these tokens.
        prefix_weights_version: See `RequestRecord`; of these tokens.
    """

    prompt_tokens: tuple[int, ...]
    start: int
    generated_tokens: Sequence[int]
    generated_log_probs: Sequence[float]
    generated_top_n_log_probs: Sequence[dict[int, float]]
    prompt_log_probs: Sequence[float]
    prompt_top_n_log_probs: Sequence[dict[int, float]]
    skipped_prefill_token_count: int = 0
    prefill_reasons: Mapping[str, int] = field(default_factory=dict)
    weights_version: Runs = ()
    prefix_weights_version: Runs = ()

    @classmethod
    def of(cls, request: Request, start: int) -> Update:
        """Copy what a request has generated from its `start`-th token on."""
        is_first, ledger = start == 0, request.ledger
        return cls(
            request.prompt_tokens,
            start,
            list(request.tokens[request.prompt_length + start :]),
            request.output.generated_log_probs[start:],
            request.output.generated_top_n[start:],
            request.output.prompt_log_probs[:] if is_first else (),
            request.output.prompt_top_n[:] if is_first else (),
            ledger.skipped,
            dict(ledger.reasons) if is_first else {},
            *request.versions.runs(start, request.generated_count),
        )


class Progress:
    """Output of a living request so far: the sum of its updates. The attributes are named as in `RequestRecord`.

    Args:
        first: First update, which is still to be added.
    """

    def __init__(self, first: Update) -> None:
        self.prompt_tokens = first.prompt_tokens
        self.skipped_prefill_token_count = first.skipped_prefill_token_count
        self.prefill_reasons = dict(first.prefill_reasons)
        self.weights_version: Runs = ()
        self.prefix_weights_version: Runs = ()
        self.generated_tokens: list[int] = []
        self.generated_log_probs: list[float] = []
        self.generated_top_n_log_probs: list[dict[int, float]] = []
        self.prompt_log_probs: list[float] = []
        self.prompt_top_n_log_probs: list[dict[int, float]] = []

    def add(self, update: Update) -> None:
        """Append an update; updates must come in order and without gaps."""
        assert update.start == len(self.generated_tokens), "an update is missing"
        self.generated_tokens += update.generated_tokens
        self.weights_version = joined(self.weights_version, update.weights_version)
        self.prefix_weights_version = joined(self.prefix_weights_version, update.prefix_weights_version)
        self.generated_log_probs += update.generated_log_probs
        self.generated_top_n_log_probs += update.generated_top_n_log_probs
        self.prompt_log_probs += update.prompt_log_probs
        self.prompt_top_n_log_probs += update.prompt_top_n_log_probs
