"""Budget of thinking: after this number of tokens a matcher allows only the marker that ends thinking."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron_ext.config.response_format import ThinkingBudget
from megatron_ext.text.matcher import Matcher

Decode = Callable[[Sequence[int]], str]


class BudgetMatcher:
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
        self._matcher = matcher
        self._budget = budget
        self._closing = closing
        self._decode = decode
        self._tokens = None if tokens is None else list(tokens)

    @property
    def seconds(self) -> float:
        """Processor time of the latest mask."""
        return self._matcher.seconds

    def copy(self) -> BudgetMatcher:
        """Return an independent matcher in the same state."""
        return BudgetMatcher(self._matcher.copy(), self._budget, self._closing, self._decode, self._tokens)

    def take(self, tokens: Sequence[int]) -> None:
        """Advance by tokens; errors as of the matcher of the output."""
        self._matcher.take(tokens)
        for token in tokens:
            if self._tokens is None:
                return
            self._tokens.append(token)
            tail = self._decode(self._tokens[-len(self._budget.closing) - len(self._closing) :])
            if self._budget.closing in tail or (len(self._tokens) == self._budget.tokens and not self._has_begun()):
                self._tokens = None

    def allowed(self, ends: Sequence[int]) -> bytes:
        """Return the mask of the next token, as the matcher of the output does.

        Args:
            ends: Tokens that end the output.
        """
        mask = self._matcher.allowed(ends)
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
