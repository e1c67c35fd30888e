"""Inputs of a request, as an immutable value."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.config import RequestParams
from megatron_ext.scheduling.record import RequestRecord


@dataclass(frozen=True)
class RequestInputs:
    """Inputs of a request: its caller makes them once, and every later stage refers to them.

    Attributes:
        prompt_tokens: Token ids of the prompt; at least one.
        params: Sampling parameters and other options.
        prompt_text: Text of the prompt, for the record; None if it was given as token ids.
        continued: Record of an earlier request of this prompt, whose output is continued; None for a new output.
        retokenized: Positions [start, end) at which an earlier turn of the conversation has other tokens for the same
            text; None if all tokens agree.
    """

    prompt_tokens: tuple[int, ...]
    params: RequestParams
    prompt_text: str | None = None
    continued: RequestRecord | None = None
    retokenized: tuple[int, int] | None = None
