"""Incremental detokenization: pieces of text that no later token changes; and excerpts of a text, for people."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
