"""Matchers of guided output: the tokens that may come next, and a budget of tokens for thinking."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from megatron_ext.config.request import ThinkingBudget

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


_LONGEST_REASON = 300  # characters
_WORD_BITS = 32  # of the library's masks


class Matcher:
    """State of one output in its grammar. Not thread-safe.

    Args:
        matcher: The library's matcher.
        tokenizer: The library's tokenizer, which may have more ids than the model.
        model_size: Vocabulary size of the model.
        mask: The library's mask of the next token, if it is known.

    Attributes:
        seconds: Processor time of the latest mask; 0 before the first.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        tokenizer: LLTokenizer,
        model_size: int,
        mask: bytes | None = None,
        seconds: float = 0.0,
    ) -> None:
        self._matcher = matcher
        self._tokenizer = tokenizer
        self._model_size = model_size
        self._end = tokenizer.eos_token
        self._mask = mask
        self.seconds = seconds

    def copy(self) -> Matcher:
        """Return an independent matcher in the same state."""
        return Matcher(self._matcher.deep_copy(), self._tokenizer, self._model_size, self._mask, self.seconds)

    def take(self, tokens: Sequence[int]) -> None:
        """Advance by tokens.

        Raises:
            ValueError: The tokens violate the grammar, or the library's limits were exceeded.
        """
        if tokens:
            self._mask = None
        if not self._matcher.consume_tokens(list(tokens)):
            raise ValueError(short_reason(self._matcher.get_error()))

    def allowed(self, ends: Sequence[int]) -> bytes:
        """Return the mask of the next token: a bit for each id, the lowest first.

        Args:
            ends: Tokens that end the output. They are allowed exactly where the output is complete.

        Raises:
            ValueError: No token is allowed, or the library's limits were exceeded.
        """
        if self._mask is None:
            started = time.thread_time()
            self._mask = self._matcher.compute_bitmask()
            self.seconds = time.thread_time() - started
        mask = bytearray(self._mask[: -(-self._model_size // _WORD_BITS) * _WORD_BITS // 8])
        is_complete = self._matcher.is_accepting()
        if self._matcher.is_error():
            raise ValueError(short_reason(self._matcher.get_error()))
        known = [token for token in ends if 0 <= token < self._model_size]
        end = [self._end] if self._end < self._model_size else []
        for token in (*end, *known, *range(self._model_size, 8 * len(mask))):
            mask[token // 8] &= ~(1 << token % 8) & 0xFF
        if is_complete:
            for token in known:
                mask[token // 8] |= 1 << token % 8
        if not any(mask):
            raise ValueError("no token of this tokenizer can follow")
        return bytes(mask)


def short_reason(text: str) -> str:
    """Return a reason of the library in one line of limited length."""
    return " ".join(text.split())[:_LONGEST_REASON]


Decode = Callable[[Sequence[int]], str]


class BudgetMatcher(Matcher):
    """Matcher of an output that begins with thinking. Not thread-safe.

    The forced tokens are legal in the grammar, too, which allows any text in thinking; so the two never part.

    Args:
        matcher: Matcher of the whole output.
        budget: Budget and markers.
        closing: Tokens of the marker that ends thinking.
        decode: Token ids to text, special tokens included.
        tokens: Tokens of thinking so far; None after its end.
    """

    def __init__(
        self,
        matcher: Matcher,
        budget: ThinkingBudget,
        closing: Sequence[int],
        decode: Decode,
        tokens: Sequence[int] | None = (),
    ) -> None:
        super().__init__(matcher._matcher, matcher._tokenizer, matcher._model_size, matcher._mask, matcher.seconds)
        self._budget = budget
        self._closing = closing
        self._decode = decode
        self._tokens = None if tokens is None else list(tokens)

    def copy(self) -> BudgetMatcher:
        """Return an independent matcher in the same state."""
        return BudgetMatcher(super().copy(), self._budget, self._closing, self._decode, self._tokens)

    def take(self, tokens: Sequence[int]) -> None:
        """Advance by tokens; errors as of `Matcher`."""
        super().take(tokens)
        for token in tokens:
            if self._tokens is None:
                return
            self._tokens.append(token)
            tail = self._decode(self._tokens[-len(self._budget.closing) - len(self._closing) :])
            if self._budget.closing in tail or (len(self._tokens) == self._budget.tokens and not self._has_begun()):
                self._tokens = None

    def allowed(self, ends: Sequence[int]) -> bytes:
        """Return the mask of the next token, as `Matcher` does; past the budget, the next token of the marker."""
        mask = super().allowed(ends)
        over = -1 if self._tokens is None else len(self._tokens) - self._budget.tokens
        if over < 0:
            return mask
        forced = bytearray(len(mask))
        token = self._closing[over % len(self._closing)]
        forced[token // 8] = 1 << token % 8
        return bytes(forced)

    def _has_begun(self) -> bool:
        assert self._tokens is not None, "asked while thinking may go on"
        opening = self._budget.opening
        return opening is None or self._decode(self._tokens).lstrip().startswith(opening)
