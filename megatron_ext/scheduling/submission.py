"""Submitted request, as an immutable value."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_ext.config import RequestParams
from megatron_ext.scheduling.audit import AuditTarget


@dataclass(frozen=True)
class Submission:
    """Request as the caller submitted it.

    Attributes:
        request_id: Unique among living requests.
        prompt_tokens: Tokens of the prompt; at least one.
        params: Sampling params and other options.
        arrival: Rank of submission; the lower goes first.
        seed: Seed of the request's own random generator.
        end_ids: Token ids each of which ends generation.
        prompt_text: Text of the prompt, if it was submitted as text.
        bad_words: Bad words of the params as token ids, each in all variants of its beginning.
        group: Number that requests of equal prompts and salts share, of which one computes the prompt for all; None for
            a request without such others.
        generated_tokens: First tokens of the output, which an earlier request has generated; the numbers of the seed
            that they were sampled with are skipped.
        audit: Cached entries to compare with what the request computes; None for a request of a caller.
        processes_logits: Value of `params.processes_logits`, computed once.
    """

    request_id: int
    prompt_tokens: tuple[int, ...]
    params: RequestParams
    arrival: int
    seed: int | str
    end_ids: tuple[int, ...] = ()
    prompt_text: str | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    group: int | None = None
    generated_tokens: tuple[int, ...] = ()
    audit: AuditTarget | None = None
    processes_logits: bool = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "processes_logits", self.params.processes_logits)
