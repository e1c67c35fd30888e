"""What a request has given so far beside its tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

TopN = dict[int, float]
"""Token id -> log-prob of the best alternatives."""


@dataclass(eq=False)
class Output:
    """Written by the output processor, and by nobody else.

    Attributes:
        generated_text: Set when a stop word cuts the text.
        prompt_log_probs: Of the prompt's tokens from the second on, as far as they are computed.
        prompt_top_n: The best alternatives to them.
        generated_log_probs: Of the generated tokens.
        generated_top_n: The best alternatives to them.
    """

    generated_text: str | None = None
    prompt_log_probs: list[float] = field(default_factory=list)
    prompt_top_n: list[TopN] = field(default_factory=list)
    generated_log_probs: list[float] = field(default_factory=list)
    generated_top_n: list[TopN] = field(default_factory=list)
