"""Streamed text of a growing list of tokens, sent as soon as it is final."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence

from megatron_ext.text.detokenizer import IncrementalDetokenizer, Piece

logger = logging.getLogger(__name__)


class TextStream:
    """Parts of a request's text: concatenated, they equal the text of its record.

    Tokens with incomplete characters are held back, and so are tokens that may begin a stop word.

    Args:
        stop_words: Non-empty strings; may be empty.
        detokenize: Token ids, and `skip_special_tokens`, to text.
    """

    def __init__(self, stop_words: Sequence[str], detokenize: Callable[..., str]) -> None:
        self._stop_words = stop_words
        self._text = IncrementalDetokenizer(detokenize)
        self._held: deque[Piece] = deque()  # they may begin a stop word in the text with special tokens
        self._plain: deque[str] = deque()  # text of earlier pieces, which may begin one in the returned text
        self._sent: list[str] = []

    def feed(self, tokens: Sequence[int]) -> str:
        """Return the text that can be sent now. `tokens` are new, and none of them ended the request."""
        parts = []
        for piece in self._text.feed(tokens):
            self._held.append(piece)
            parts += self._release()
        return self._send("".join(parts))

    def finish(self, text: str) -> str:
        """Return the unsent rest of `text`, the text of the request's record."""
        sent = "".join(self._sent)
        if not text.startswith(sent):
            logger.warning(
                "a stream sent %d characters that are not the beginning of the text of %d characters",
                len(sent),
                len(text),
            )
        return self._send(text[len(sent) :])

    def _release(self) -> list[str]:
        """Release the pieces that end before a possible beginning of a stop word."""
        certain = self._certain("".join(piece.visible for piece in self._held))
        while self._held and len(self._held[0].visible) <= certain:
            piece = self._held.popleft()
            certain -= len(piece.visible)
            if piece.plain:
                self._plain.append(piece.plain)
        certain = self._certain("".join((*self._plain, *(piece.plain for piece in self._held))))
        parts = []
        while self._plain and len(self._plain[0]) <= certain:
            certain -= len(self._plain[0])
            parts.append(self._plain.popleft())
        return parts

    def _certain(self, text: str) -> int:
        """Return the number of characters of a text before a possible beginning of a stop word."""
        return len(text) - max((_overlap(text, word) for word in self._stop_words), default=0)

    def _send(self, text: str) -> str:
        if text:
            self._sent.append(text)
        return text


def _overlap(text: str, word: str) -> int:
    """Return the length of the longest end of `text` that is a proper beginning of `word`."""
    longest = min(len(text), len(word) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(word[:length])), 0)
