"""What a request does to its logits before a token is chosen by temperature, top_k and top_p.

Everything that it depends on stands here, the tokens of the whole sequence included, so nothing of it is carried from
step to step: chunks, preemption, suspension and what was cached make no difference.
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
    """Penalties, biases, words that must not come, a mask, and the least share of the best token's probability.

    Attributes:
        tokens: Of prompt and generation, as they are packed; none where neither penalties nor bad words need them.
        prompt_length: How many of them are the prompt.
        repetition: Divides the logits of tokens that came, where they are above zero, and multiplies those below.
        presence: Taken off the logits of generated tokens.
        frequency: The same, for each time that one came.
        biases: Added to logits.
        bad_words: Tokens each; the last one must not come behind the others.
        min_p: Tokens below this share of the best one's probability are left out; 0 is off.
        allowed: A bit for each token that may come, the lowest id first; None allows every token.
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
        """Whether tokens that came count."""
        return bool(self.presence or self.frequency or self.repetition != 1)

    @property
    def ruled_out(self) -> list[int]:
        """The last tokens of words whose others have just come. Words are looked for in what was generated."""
        generated = self.tokens[self.prompt_length :]
        return [
            word[-1]
            for word in self.bad_words
            if len(word) == 1 or generated[1 - len(word) :] == array(generated.typecode, word[:-1])
        ]


def logits_options_of(request: Request, drafts: Sequence[int] = ()) -> LogitsOptions:
    """What a request that shapes its logits does to those of its next token, or of the one behind these drafts."""
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
    """Whether what is done to its logits depends on the tokens that came."""
    return params.has_penalties or bool(params.bad_words or params.form)
