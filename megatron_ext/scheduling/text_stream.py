"""The text of a growing list of tokens, sent in parts as soon as they are certain."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from megatron_ext.scheduling.stopping import INCOMPLETE, PATIENCE, settled_text

logger = logging.getLogger(__name__)


class TextStream:
    """Parts of a request's text: put together they are the text of its record, to the character.

    Held back are tokens whose bytes are no whole character yet, and tokens that may turn out to be the beginning of a
    stop word. As in `StopWordMatcher` a call decodes the newest tokens with some context before them, so the cost does
    not grow with the generation.

    Args:
        stop_words: Non-empty strings; there may be none.
        detokenize: Token ids, and whether special tokens are left out, to text.
    """

    def __init__(self, stop_words: Sequence[str], detokenize: Callable[..., str]) -> None:
        self._stop_words = stop_words
        self._visible = partial(detokenize, skip_special_tokens=False)
        self._plain = detokenize
        self._context_start = 0
        self._decoded_end = 0
        self._held: deque[tuple[str, str]] = deque()  # pieces of text with and without special tokens
        self._sent: list[str] = []

    def feed(self, tokens: list[int]) -> str:
        """What can be sent now. `tokens` are all generated so far, none of which ended the request."""
        context = self._visible(tokens[self._context_start : self._decoded_end])
        both = self._visible(tokens[self._context_start :])
        new = both[len(context) :]
        if new and not new.endswith(INCOMPLETE):
            self._accept(tokens, len(tokens), new)
        elif len(tokens) - self._decoded_end > PATIENCE:
            settled = settled_text(tokens, self._context_start, both, self._visible)
            if settled is not None:
                end, text = settled
                self._accept(tokens, end, text[len(context) :])
        return self._send(self._release())

    def finish(self, text: str) -> str:
        """What is left of `text`, the text of the request's record."""
        sent = "".join(self._sent)
        if not text.startswith(sent):
            logger.warning("a stream sent %d characters with which the text of %d does not begin", len(sent), len(text))
        return self._send(text[len(sent) :])

    def _accept(self, tokens: list[int], end: int, visible: str) -> None:
        """The tokens up to `end` add `visible` for good."""
        context = self._plain(tokens[self._context_start : self._decoded_end])
        plain = self._plain(tokens[self._context_start : end])[len(context) :]
        self._held.append((visible, plain))
        if plain:  # special tokens alone are no context: some decoders take the first space of a text away
            self._context_start = self._decoded_end
        self._decoded_end = end

    def _release(self) -> str:
        """Let go of the pieces that end before whatever may be the beginning of a stop word."""
        text = "".join(visible for visible, _ in self._held)
        certain = len(text) - max((_overlap(text, word) for word in self._stop_words), default=0)
        parts = []
        while self._held and len(self._held[0][0]) <= certain:
            visible, plain = self._held.popleft()
            certain -= len(visible)
            parts.append(plain)
        return "".join(parts)

    def _send(self, text: str) -> str:
        if text:
            self._sent.append(text)
        return text


def _overlap(text: str, word: str) -> int:
    """Characters at the end of `text` with which `word` begins and goes on."""
    longest = min(len(text), len(word) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(word[:length])), 0)
