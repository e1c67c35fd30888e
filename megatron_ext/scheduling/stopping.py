"""Stop words, matched on text: the same words stop a request however they were cut into tokens."""

from __future__ import annotations

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
    """

    def __init__(self, stop_words: Sequence[str], detokenize: Callable[[list[int]], str]) -> None:
        self._stop_words = stop_words
        self._detokenize = detokenize
        self._reach = max(len(word) for word in stop_words) - 1  # a match may begin this far before new text
        self._text = ""
        self._searched = 0  # characters that were searched before
        self._context_start = 0
        self._decoded_end = 0

    def find(self, tokens: list[int]) -> str | None:
        """The text before the first stop word, or None if there is none yet. `tokens` are all generated so far."""
        context = self._detokenize(tokens[self._context_start : self._decoded_end])
        both = self._detokenize(tokens[self._context_start :])
        new = both[len(context) :]
        searchable = (self._text + new).rstrip(INCOMPLETE)
        start = max(0, self._searched - self._reach)
        self._searched = len(searchable)
        hits = [hit for word in self._stop_words if (hit := searchable.find(word, start)) >= 0]
        if hits:
            return searchable[: min(hits)]
        if new and not new.endswith(INCOMPLETE):
            self._accept(new, len(tokens))
        elif len(tokens) - self._decoded_end > PATIENCE:
            self._settle(tokens, context, both)
        return None

    def _accept(self, text: str, end: int) -> None:
        """`text` is what the tokens up to `end` add for good."""
        self._text += text
        self._context_start, self._decoded_end = self._decoded_end, end

    def _settle(self, tokens: list[int], context: str, both: str) -> None:
        """Accept the tokens up to the last place that no character reaches across any more."""
        latest = len(tokens) - (LONGEST_CHARACTER - 1)
        for end in range(latest, latest - LONGEST_CHARACTER, -1):
            settled = self._detokenize(tokens[self._context_start : end])
            if both.startswith(settled):
                self._accept(settled[len(context) :], end)
                return
