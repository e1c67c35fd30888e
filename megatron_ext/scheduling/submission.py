"""A request as it was submitted; nothing of it ever changes."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_ext.config import RequestParams


@dataclass(frozen=True)
class Submission:
    """What a caller asked for.

    Attributes:
        request_id: Not in use by another living request.
        prompt_tokens: At least one.
        params: How it is sampled, and what it asks for.
        arrival: Rank of submission; the lower goes first.
        seed: Of the request's own random generator.
        end_ids: Tokens each of which ends generation.
        prompt_text: If the prompt came as text.
        bad_words: Those of the params as token ids, each in all the ways it can begin.
        processes_logits: What the params say, looked up once.
    """

    request_id: int
    prompt_tokens: tuple[int, ...]
    params: RequestParams
    arrival: int
    seed: int | str
    end_ids: tuple[int, ...] = ()
    prompt_text: str | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    processes_logits: bool = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "processes_logits", self.params.processes_logits)
