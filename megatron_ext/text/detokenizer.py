"""The text of a growing list of tokens, in pieces that no later token changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

INCOMPLETE = "\ufffd"  # what a decoder shows for the first bytes of a character, and for bytes that are none
LONGEST_CHARACTER = 4  # bytes in UTF-8, so at most as many tokens
PATIENCE = 16  # tokens that may wait for the end of a character before they are looked at more closely


@dataclass(frozen=True)
class Piece:
    """What some tokens add to the text, for good.

    Attributes:
        visible: With special tokens.
        plain: Without them; the plain pieces put together are the text that is given back. None if not asked for.
        end: Tokens from the first one to the end of the piece.
    """

    visible: str
    plain: str | None
    end: int


class IncrementalDetokenizer:
    """Decodes new tokens with the piece before them as context; a token's cost does not grow with the text.

    The context is needed because some tokenizers write a space, or half a character, that depends on it. It ends with
    the piece before; if that shows nothing, the last piece that shows something stands before it. Where plain text is
    asked for, special tokens show nothing.

    Args:
        detokenize: Token ids, and `skip_special_tokens`, to text.
        with_plain: Whether pieces have plain text; without it half as much is decoded.
    """

    def __init__(self, detokenize: Callable[..., str], *, with_plain: bool = True) -> None:
        self._detokenize = detokenize
        self._with_plain = with_plain
        self._window: list[int] = []  # the context, then the tokens that no piece has yet
        self._dropped = 0  # tokens before and within the context that the window has no more
        self._shown_length = 0  # of the context, up to the end of its last piece that shows something
        self._context_length = 0
        self.tail = ""

    def feed(self, tokens: Sequence[int]) -> list[Piece]:
        """The pieces that `tokens`, which follow those fed before, complete.

        Afterwards `tail` is the visible text of the tokens that have no piece yet; it may end with `INCOMPLETE`, and
        later tokens may change it.
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
            return self._accept(new, len(self._window))
        if len(self._window) - self._context_length > PATIENCE:
            settled = self._settle(both)
            if settled is not None:
                length, text = settled
                piece = self._accept(text[len(context) :], length)
                self.tail = new[len(piece.visible) :]
                return piece
        self.tail = new
        return None

    def _accept(self, visible: str, length: int) -> Piece:
        """The first `length` tokens of the window add `visible`, and are the next ones' context."""
        plain = self._plain(length)[len(self._plain(self._context_length)) :] if self._with_plain else None
        # What shows nothing is no context: some decoders take the first space of a text away.
        shown = visible if plain is None else plain
        kept = 0 if shown else self._shown_length
        del self._window[kept : self._context_length]
        self._dropped += self._context_length - kept
        self._context_length = length - self._context_length + kept
        self._shown_length = self._context_length if shown else kept
        return Piece(visible, plain, self._dropped + self._context_length)

    def _settle(self, text: str) -> tuple[int, str] | None:
        """The last place in the window that no character reaches across any more, and the text up to it.

        Args:
            text: Of the whole window, which ends with no whole character.

        Returns:
            None if there is no such place among the last few tokens.
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
