"""Stop words, matched on text: the same words stop a request however they were cut into tokens."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence

INCOMPLETE = "\ufffd"  # what a decoder shows for the first bytes of a character, and for bytes that are none
LONGEST_CHARACTER = 4  # bytes in UTF-8, so at most as many tokens
PATIENCE = 16  # tokens that may wait for the end of a character before they are looked at more closely


class StopWordMatcher:
    """Follows a growing list of tokens and finds the first stop word in its text.

    Each call decodes the tokens since the last complete piece of text only, with one piece of context before them, so
    the cost does not grow with the generation.

    Args:
        stop_words: Non-empty strings.
        detokenize: Token ids to text; special tokens must stay visible.
        detokenize_plainly: The same without special tokens, for the text that is given back; default: no difference.
    """

    def __init__(
        self,
        stop_words: Sequence[str],
        detokenize: Callable[[list[int]], str],
        detokenize_plainly: Callable[[list[int]], str] | None = None,
    ) -> None:
        self._stop_words = stop_words
        self._detokenize = detokenize
        self._detokenize_plainly = detokenize_plainly or detokenize
        self._text = ""
        self._searched = 0  # characters that were searched before
        self._context_start = 0
        self._decoded_end = 0
        self._piece_starts = [0]  # characters of the accepted text before each of its pieces, and of all
        self._piece_token_starts = [0]  # the same in tokens

    def find(self, tokens: list[int], *, ignore: bool = False) -> str | None:
        """The text before the first stop word, or None if there is none yet.

        Args:
            tokens: All generated so far.
            ignore: Pass over the stop words that are complete by now, for good.
        """
        context = self._detokenize(tokens[self._context_start : self._decoded_end])
        both = self._detokenize(tokens[self._context_start :])
        new = both[len(context) :]
        searchable = (self._text + new).rstrip(INCOMPLETE)
        searched, self._searched = self._searched, len(searchable)  # a new match ends behind what was searched before
        starts = {word: max(0, searched - len(word) + 1) for word in self._stop_words}
        hits = [hit for word, start in starts.items() if (hit := searchable.find(word, start)) >= 0]
        if hits and not ignore:
            return self._plain_text(tokens, searchable, min(hits))
        if new and not new.endswith(INCOMPLETE):
            self._accept(new, len(tokens))
        elif len(tokens) - self._decoded_end > PATIENCE:
            self._settle(tokens, context, both)
        return None

    def _accept(self, text: str, end: int) -> None:
        """`text` is what the tokens up to `end` add for good."""
        self._text += text
        self._piece_starts.append(len(self._text))
        self._piece_token_starts.append(end)
        self._context_start, self._decoded_end = self._decoded_end, end

    def _plain_text(self, tokens: list[int], text: str, end: int) -> str:
        """The first `end` characters of `text`, less its special tokens.

        Whole pieces before the cut are decoded again, plainly. Of the piece that is cut the beginning stays, unless the
        piece is a special token.
        """
        piece = bisect.bisect_right(self._piece_starts, end) - 1
        first_token = self._piece_token_starts[piece]
        is_last = piece + 1 == len(self._piece_starts)
        last_token = len(tokens) if is_last else self._piece_token_starts[piece + 1]
        is_special = not self._detokenize_plainly(tokens[first_token:last_token])
        before = self._detokenize_plainly(tokens[:first_token])
        return before if is_special else before + text[self._piece_starts[piece] : end]

    def _settle(self, tokens: list[int], context: str, both: str) -> None:
        """Accept the tokens up to the last place that no character reaches across any more."""
        settled = settled_text(tokens, self._context_start, both, self._detokenize)
        if settled is not None:
            end, text = settled
            self._accept(text[len(context) :], end)


def settled_text(
    tokens: list[int], start: int, text: str, detokenize: Callable[[list[int]], str]
) -> tuple[int, str] | None:
    """The last place in `tokens` that no character reaches across any more, and the text from `start` up to it.

    Args:
        tokens: All so far, the last ones of no whole character.
        start: Where `text` begins, in tokens.
        text: Of the tokens from `start` on.
        detokenize: Token ids to text.

    Returns:
        None if there is no such place among the last few tokens.
    """
    latest = len(tokens) - (LONGEST_CHARACTER - 1)
    for end in range(latest, latest - LONGEST_CHARACTER, -1):
        settled = detokenize(tokens[start:end])
        if text.startswith(settled):
            return end, settled
    return None
