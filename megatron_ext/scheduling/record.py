"""Records of requests that have ended, for the user."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from megatron_ext.config import RequestParams
from megatron_ext.scheduling.explanation import Explanation
from megatron_ext.scheduling.request_events import Event
from megatron_ext.scheduling.routing_indices import RoutingIndices
from megatron_ext.scheduling.token_versions import Runs

TopN = dict[int, float]
"""Token id -> log-prob of the best alternatives."""
LEAST_LOG_PROB = -9999.0
"""Log-prob that stands for minus infinity in answers: JSON has none."""


@dataclass(eq=False)
class Output:
    """Text and log-probs of a request; only the output processor writes them.

    Attributes:
        generated_text: Set when a stop word cuts the text.
        stop_word: Stop word that has ended the request.
        prompt_log_probs: Log-probs of the prompt's tokens from the second on, as far as they are computed.
        prompt_top_n: Top-n alternatives to the prompt's tokens.
        generated_log_probs: Log-probs of the generated tokens.
        generated_top_n: Top-n alternatives to the generated tokens.
        routing: Routing indices of the tokens computed so far; None if they are not recorded. Only the routing recorder
            writes them.
        taken: Generated tokens that the output processor has processed; with drafts a step adds several.
        cached_routing: Rows of the cached blocks that the request resumed in, until its first chunk is computed.
    """

    generated_text: str | None = None
    stop_word: str | None = None
    prompt_log_probs: list[float] = field(default_factory=list)
    prompt_top_n: list[TopN] = field(default_factory=list)
    generated_log_probs: list[float] = field(default_factory=list)
    generated_top_n: list[TopN] = field(default_factory=list)
    routing: RoutingIndices | None = None
    taken: int = 0
    cached_routing: bytes = b""


class Status(enum.Enum):
    """Final status of a request."""

    COMPLETED = enum.auto()
    FAILED = enum.auto()
    ABORTED = enum.auto()


@dataclass(frozen=True)
class Outcome:
    """Final status of a request and its reason."""

    status: Status
    finish_reason: str | None = None  # "stop", "length", "abort" (by a pause that ends requests) or None
    error: str | None = field(default=None, kw_only=True)
    is_fault: bool = field(default=False, kw_only=True)  # FAILED by an internal error, not by the request itself


@dataclass(frozen=True, kw_only=True)
class RequestRecord:
    """Record of one request over its whole life, preemptions included.

    Log-probs are natural logarithms. A top-n entry maps token ids to log-probs.
    """

    request_id: int
    params: RequestParams | None = None
    seed: int | str = 0  # of its random generator; with the parameters it lets another request continue this one

    # Outcome, as in `Outcome`
    status: Status
    finish_reason: str | None = None
    error: str | None = None
    is_fault: bool = False

    # Texts and tokens; the prompt is as it was submitted
    prompt_text: str | None
    prompt_tokens: tuple[int, ...]
    generated_text: str
    generated_tokens: tuple[int, ...]
    stop_word: str | None = None  # that has ended the request; None if it ended otherwise

    # Versions of the weights: (version, tokens) of consecutive generated tokens; (version, 0) if none was generated
    weights_version: Runs = ()  # that made the tokens
    prefix_weights_version: Runs = ()  # that computed their prefixes; other ones after `in_flight="continue"` only

    # Log-probs; None if they were not requested
    prompt_log_probs: tuple[float, ...] | None = None  # entry i belongs to prompt token i + 1
    generated_log_probs: tuple[float, ...] | None = None  # one entry per generated token
    prompt_top_n_log_probs: tuple[TopN, ...] | None = None
    generated_top_n_log_probs: tuple[TopN, ...] | None = None

    # Experts of every token but the last; None if they are not recorded
    routing_indices: RoutingIndices | None = None

    # Times, in seconds
    events: tuple[Event, ...]
    arrival_wall_time: float  # since the epoch
    latency: float
    ttft: float | None  # None if no token was generated
    step_count: int  # engine steps that computed a chunk of the request

    # Account of the prompt tokens (EX-2)
    matched_block_count: int
    skipped_prefill_token_count: int
    skipped_from_disk_token_count: int = 0  # skipped tokens that entries from disk have saved
    computed_prefill_token_count: int
    recomputed_token_count: int
    prefill_reasons: dict[str, int]  # reason of EX-2 -> tokens
    prefix_cache_explanation: Explanation | None = None  # None if explanations are off

    # Draft tokens (SP-7)
    draft_token_count: int = 0  # verified by steps
    accepted_token_count: int = 0  # accepted by steps

    @property
    def prompt_token_count(self) -> int:
        """Tokens of the prompt as it was submitted."""
        return len(self.prompt_tokens)
