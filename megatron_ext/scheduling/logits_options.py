"""Logits processing options of a request, applied before temperature, top_k and top_p.

The options contain everything that the processing depends on, including the tokens of the whole sequence. No state is
carried from step to step: chunks, preemption, suspension and cache hits make no difference.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ext.config import RequestParams
from megatron_ext.config.token_biases import TokenBiases
from megatron_ext.scheduling.request import Request


@dataclass(frozen=True)
class LogitsOptions:
    """Penalties, biases, bad words, a token mask and min_p of one request at one position.

    Attributes:
        tokens: Packed tokens of prompt and generation; empty if neither penalties nor bad words need them.
        prompt_length: Prompt tokens among them.
        repetition: Divisor of the logits of tokens that occurred, where these are positive, and factor where negative.
        presence: Subtracted from the logits of generated tokens.
        frequency: Subtracted from the logit of a generated token once per occurrence.
        biases: Token biases, added to the logits.
        bad_words: Token ids of each word; the last one must not follow the others.
        min_p: Minimum probability of a token as a share of the best one's; 0 disables the filter.
        allowed: One bit per token id that is allowed, the lowest id first; None allows every token.
    """

    tokens: array[int]
    prompt_length: int
    repetition: float
    presence: float
    frequency: float
    biases: TokenBiases
    bad_words: tuple[tuple[int, ...], ...]
    min_p: float
    allowed: bytes | None = None

    @property
    def has_penalties(self) -> bool:
        """True if earlier tokens change the logits."""
        return bool(self.presence or self.frequency or self.repetition != 1)

    @property
    def ruled_out(self) -> list[int]:
        """Last tokens of bad words whose other tokens are the newest generated ones."""
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
    tokens = sequence.packed[:] if needs_tokens else sequence.packed[:0]
    if needs_tokens:
        tokens.extend(drafts)
    return LogitsOptions(
        tokens=tokens,
        prompt_length=sequence.prompt_length,
        repetition=params.repetition_penalty,
        presence=params.presence_penalty,
        frequency=params.frequency_penalty,
        biases=params.logit_bias,
        bad_words=request.submission.bad_words,
        min_p=0.0 if params.is_greedy else params.min_p,
        allowed=None if params.form is None else sequence.masks[len(drafts)],
    )


def reads_tokens(params: RequestParams) -> bool:
    """Return whether logits processing depends on tokens generated before."""
    return params.has_penalties or bool(params.bad_words or params.form)
