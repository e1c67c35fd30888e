"""Stop words, matched on text, independent of their tokenization."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron_ext.text.detokenizer import INCOMPLETE, IncrementalDetokenizer, Piece


class StopWordMatcher:
    """Incremental search for the first stop word in the text of a growing list of tokens.

    Only new text is searched, and the few characters before it in which a word may begin.

    Args:
        stop_words: Non-empty strings.
        detokenize: Token ids, and `skip_special_tokens`, to text. Words may be special tokens, or parts of them.

    Attributes:
        found: The first stop word; None if no word is complete yet.
    """

    def __init__(self, stop_words: Sequence[str], detokenize: Callable[..., str]) -> None:
        self.found: str | None = None
        self._stop_words = stop_words
        self._reach = max(len(word) for word in stop_words) - 1  # characters of a word that may already be in the text
        self._detokenize = detokenize
        self._text = IncrementalDetokenizer(detokenize, with_plain=False)
        self._tokens: list[int] = []
        self._old_end = 0  # tokens of the pieces in which no word can begin any more
        self._recent: list[Piece] = []  # the other pieces
        self._searched = 0  # characters of the recent pieces and the tail

    def feed(self, tokens: Sequence[int], *, ignore: bool = False) -> str | None:
        """Return the text before the first stop word, or None if no word is complete yet.

        Args:
            tokens: Tokens since the last call.
            ignore: Whether stop words that are complete by now are ignored for good.
        """
        for token in tokens:
            self._tokens.append(token)
            self._recent += self._text.feed([token])
            text = self._searchable()
            hit = None if ignore else self._first_hit(text)
            if hit is not None:
                return self._text_before(hit)
            self._searched = len(text)
            self._forget_old()
        return None

    def _searchable(self) -> str:
        return ("".join(piece.visible for piece in self._recent) + self._text.tail).rstrip(INCOMPLETE)

    def _first_hit(self, text: str) -> int | None:
        """Return the start of the first word whose end was not searched before; of equal starts the longest word."""
        starts = {word: max(0, self._searched - len(word) + 1) for word in self._stop_words}
        hits = {word: hit for word, start in starts.items() if (hit := text.find(word, start)) >= 0}
        self.found = min(hits, key=lambda word: (hits[word], -len(word)), default=None)
        return None if self.found is None else hits[self.found]

    def _forget_old(self) -> None:
        """Drop pieces that were searched and end before any position where an unfinished word can begin."""
        while self._recent and self._searched - len(self._recent[0].visible) >= self._reach:
            old = self._recent.pop(0)
            self._old_end = old.end
            self._searched -= len(old.visible)

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
