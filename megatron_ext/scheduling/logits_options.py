"""Logits processing options of a request, applied before temperature, top_k and top_p.

The options contain everything that the processing depends on, including the tokens of the whole sequence. No state is
carried from step to step: chunks, preemption, suspension and cache hits make no difference.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_ext.config import RequestParams
from megatron_ext.scheduling.request import Request


@dataclass(frozen=True)
class LogitsOptions:
    """Logits processing options of one request at one position.

    Attributes:
        params: Parameters of the request, such as penalties, biases and min_p.
        tokens: Packed tokens of prompt and generation; empty if neither penalties nor bad words need them.
        prompt_length: Prompt tokens among them.
        bad_words: Token ids of each word; the last one must not follow the others.
        allowed: One bit per token id that is allowed, the lowest id first; None allows every token.
    """

    params: RequestParams
    tokens: array[int] = field(default_factory=lambda: array("I"))
    prompt_length: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed: bytes | None = None

    @property
    def ruled_out(self) -> list[int]:
        """Last tokens of bad words whose other tokens are the newest generated ones."""
        if not self.bad_words:
            return []
        generated = self.tokens[self.prompt_length :]
        return [
            word[-1]
            for word in self.bad_words
            if len(word) == 1 or generated[1 - len(word) :] == array(generated.typecode, word[:-1])
        ]


def logits_options_of(request: Request, drafts: Sequence[int] = ()) -> LogitsOptions:
    """Return the logits processing options for the next token of a request, or for the token after `drafts`."""
    params, sequence = request.params, request.sequence
    needs_tokens = params.has_penalties or bool(params.bad_words)
    tokens = sequence.tokens[:] if needs_tokens else sequence.tokens[:0]
    if needs_tokens:
        tokens.extend(drafts)
    return LogitsOptions(
        params=params,
        tokens=tokens,
        prompt_length=sequence.prompt_length,
        bad_words=request.bad_words,
        allowed=None if params.response_format is None else sequence.masks[len(drafts)],
    )


def reads_tokens(params: RequestParams) -> bool:
    """Return whether logits processing depends on tokens generated before."""
    return params.has_penalties or bool(params.bad_words or params.response_format)
