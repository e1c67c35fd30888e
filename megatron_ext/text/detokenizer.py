"""Incremental detokenization: pieces of text that no later token changes; stop words; and excerpts, for people.

Stop words are matched on text, independent of their tokenization. A word is found in the returned text, and in the text
with special tokens: words may be special tokens, or parts of them. Streamed text may begin one.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_ext.text.tool_calls.source import overlap

logger = logging.getLogger(__name__)

INCOMPLETE = "\ufffd"  # decoded for incomplete characters and for invalid bytes
LONGEST_CHARACTER = 4  # bytes in UTF-8, so at most as many tokens
PATIENCE = 16  # tokens without a complete character before they are split


@dataclass(frozen=True)
class Piece:
    """Final text of some tokens.

    Attributes:
        visible: Text with special tokens.
        plain: Text without special tokens; concatenated, the output text.
        end: Number of tokens up to the end of the piece.
    """

    visible: str
    plain: str
    end: int


class IncrementalDetokenizer:
    """Decoder of new tokens with the previous piece as context; the cost of a token does not grow with the text.

    The context is needed because some tokenizers write a space, or half a character, that depends on it. It ends with
    the previous piece; if that is empty text, it starts with the last non-empty piece. Special tokens count as empty.

    Args:
        detokenize: Token ids, and `skip_special_tokens`, to text.
    """

    def __init__(self, detokenize: Callable[..., str]) -> None:
        self._detokenize = detokenize
        self._window: list[int] = []  # the context, then the tokens without a piece
        self._dropped = 0  # tokens removed from the window, before or within the context
        self._shown_length = 0  # length of the context up to the end of its last non-empty piece
        self._context_length = 0
        self.tail = ""

    def feed(self, tokens: Sequence[int]) -> list[Piece]:
        """Return the pieces that `tokens`, which follow those fed before, complete.

        Afterwards `tail` is the visible text of the tokens without a piece; it may end with `INCOMPLETE`, and later
        tokens may change it.
        """
        pieces = []
        for token in tokens:
            self._window.append(token)
            piece = self._advance()
            if piece is not None and piece.visible:
                pieces.append(piece)
        return pieces

    def _advance(self) -> Piece | None:
        context = self._visible(self._context_length)
        both = self._visible(len(self._window))
        new = both[len(context) :]
        self.tail = ""
        if new and not new.endswith(INCOMPLETE):
            return self._accept(context, both, len(self._window))
        if len(self._window) - self._context_length > PATIENCE:
            settled = self._settle(both)
            if settled is not None:
                length, text = settled
                piece = self._accept(context, text, length)
                self.tail = new[len(piece.visible) :]
                return piece
        self.tail = new
        return None

    def _accept(self, context: str, text: str, length: int) -> Piece:
        """Append the piece that `text`, the window's first `length` tokens, adds to `context`; they become the next."""
        visible = text[len(context) :]
        plain = self._plain(length)
        plain = visible if plain == text else plain[len(self._plain(self._context_length)) :]
        # Empty text cannot be context: some decoders strip the first space of a text.
        kept = 0 if plain else self._shown_length
        del self._window[kept : self._context_length]
        self._dropped += self._context_length - kept
        self._context_length = length - self._context_length + kept
        self._shown_length = self._context_length if plain else kept
        return Piece(visible, plain, self._dropped + self._context_length)

    def _settle(self, text: str) -> tuple[int, str] | None:
        """Find the last token boundary in the window that no character crosses, and the text up to it.

        Args:
            text: Text of the whole window, which ends with an incomplete character.

        Returns:
            None if there is no such boundary among the last few tokens.
        """
        latest = len(self._window) - (LONGEST_CHARACTER - 1)
        for length in range(latest, latest - LONGEST_CHARACTER, -1):
            settled = self._visible(length)
            if text.startswith(settled):
                return length, settled
        return None

    def _visible(self, length: int) -> str:
        return self._detokenize(self._window[:length], skip_special_tokens=False)

    def _plain(self, length: int) -> str:
        return self._detokenize(self._window[:length])


SHOWN = 40  # characters on each side
_SHOWN_TOKENS = SHOWN * LONGEST_CHARACTER + LONGEST_CHARACTER  # enough where each token is a byte


def excerpt(tokens: Sequence[int], place: int | None, detokenize: Callable[..., str]) -> tuple[str, str] | None:
    """Return up to 40 characters before and after a place; one that tokens before and after share is after it.

    Args:
        tokens: Token ids.
        place: Number of tokens before the place; None for no excerpt.
        detokenize: Token ids, and `skip_special_tokens`, to text.

    Raises:
        ConfigError: The tokenizer cannot decode the tokens.
    """
    if place is None:
        return None
    start, end = max(0, place - _SHOWN_TOKENS), min(len(tokens), place + _SHOWN_TOKENS)
    whole = detokenize(list(tokens[start:end]), skip_special_tokens=False)
    first = detokenize(list(tokens[start:place]), skip_special_tokens=False)
    first = first.rstrip(INCOMPLETE)
    same = zip(first, whole, strict=False)
    length = next((i for i, (one, other) in enumerate(same) if one != other), min(len(first), len(whole)))
    before, after = whole[max(0, length - SHOWN) : length], whole[length : length + SHOWN]
    return before.lstrip(INCOMPLETE) if start else before, after.rstrip(INCOMPLETE) if end < len(tokens) else after


class StopWordMatcher:
    """Incremental search for the first stop word in the text of a growing list of tokens.

    Only new text is searched, and the few characters before it in which a word may begin.

    Args:
        stop_words: Non-empty strings.
        detokenize: Token ids, and `skip_special_tokens`, to text.

    Attributes:
        found: The first stop word; None if no word is complete yet.
    """

    def __init__(self, stop_words: Sequence[str], detokenize: Callable[..., str]) -> None:
        self.found: str | None = None
        self._stop_words = stop_words
        self._reach = max(len(word) for word in stop_words) - 1  # characters of a word that may already be in the text
        self._detokenize = detokenize
        self._text = IncrementalDetokenizer(detokenize)
        self._tokens: list[int] = []
        self._old_end = 0  # tokens of the pieces in which no word can begin any more
        self._recent: list[Piece] = []  # the other pieces
        self._searched = 0  # characters of the recent pieces and the tail
        self._returned = ""  # end of the returned text, in which a word can begin
        self._returned_end = 0  # tokens up to the end of this text
        self._returned_searched = 0  # characters of this text and the tail

    def feed(self, tokens: Sequence[int], *, ignore: bool = False) -> str | None:
        """Return the text before the first stop word, or None if no word is complete yet.

        Args:
            tokens: Tokens since the last call.
            ignore: Whether stop words that are complete by now are ignored for good.
        """
        for token in tokens:
            self._tokens.append(token)
            for piece in self._text.feed([token]):
                self._recent.append(piece)
                self._returned += piece.plain
                self._returned_end = piece.end
            visible = ("".join(piece.visible for piece in self._recent) + self._text.tail).rstrip(INCOMPLETE)
            returned = (self._returned + self._text.tail).rstrip(INCOMPLETE)
            found = None if ignore else self._first(visible, returned)
            if found is not None:
                return found
            self._searched, self._returned_searched = len(visible), len(returned)
            self._forget_old()
        return None

    def _first(self, visible: str, returned: str) -> str | None:
        """Return the text before the first word that has become complete, and note the longest one that begins there.

        Args:
            visible: Text of the recent pieces and the tail, with special tokens.
            returned: End of the returned text, tail included.
        """
        hits = [(self._text_before(hit), word) for word, hit in self._hits(visible, self._searched)]
        for word, hit in self._hits(returned, self._returned_searched):
            whole = self._plain(self._returned_end) + self._text.tail
            hits.append((whole[: len(whole) - len(self._returned + self._text.tail) + hit], word))
        if not hits:
            return None
        text, self.found = min(hits, key=lambda hit: (len(hit[0]), -len(hit[1])))
        return text

    def _hits(self, text: str, searched: int) -> list[tuple[str, int]]:
        """Return the words whose ends are after the first `searched` characters, and their starts."""
        starts = ((word, text.find(word, max(0, searched - len(word) + 1))) for word in self._stop_words)
        return [(word, start) for word, start in starts if start >= 0]

    def _forget_old(self) -> None:
        """Drop text that was searched and ends before any position where an unfinished word can begin."""
        while self._recent and self._searched - len(self._recent[0].visible) >= self._reach:
            old = self._recent.pop(0)
            self._old_end = old.end
            self._searched -= len(old.visible)
        old_length = min(len(self._returned), max(0, self._returned_searched - self._reach))
        self._returned = self._returned[old_length:]
        self._returned_searched -= old_length

    def _text_before(self, length: int) -> str:
        """Return the whole text up to the first `length` searchable characters, without special tokens.

        The beginning of the last, cut piece is kept, unless the piece is a special token.
        """
        start, end = 0, self._old_end
        for piece in self._recent:
            stop = start + len(piece.visible)
            if stop > length:
                before = self._plain(end)
                return before + (piece.visible[: length - start] if self._plain(piece.end) != before else "")
            start, end = stop, piece.end
        return self._plain(end) + self._text.tail[: length - start]

    def _plain(self, end: int) -> str:
        return self._detokenize(self._tokens[:end])


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
        return len(text) - overlap(text, *self._stop_words)

    def _send(self, text: str) -> str:
        if text:
            self._sent.append(text)
        return text
