"""Bytes of single tokens, those with a part of a character included, and of each token in a text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

_NEAR = 64  # bytes; a decoder may write spaces between two tokens


class TokenVocabulary(Protocol):
    """Texts and bytes of single tokens."""

    def token_text(self, token: int) -> str:
        """Return the text of a single token, special or not."""

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a single token, special or not, which may be a part of a character."""


def bytes_in_text(vocabulary: TokenVocabulary, tokens: Sequence[int], text: str) -> list[bytes]:
    """Return the bytes of a text that each of its tokens stands for; joined, they are the text in UTF-8.

    A token that the text does not show, such as a special one, has none. A text that has been cut ends within the
    bytes of a token. Where bytes are no character, the text has U+FFFD for one or several tokens; the first has it.

    Args:
        vocabulary: Vocabulary of the tokens.
        tokens: Tokens that the text came with; none if it is empty.
        text: The text.
    """
    whole, found, at = text.encode(), [], 0
    for token in tokens:
        end = _end(whole, at, vocabulary.token_bytes(token), vocabulary.token_text(token).encode())
        found.append(whole[at:end])
        at = end
    if found and at < len(whole):
        last = max((i for i, one in enumerate(found) if one), default=0)
        found[last] += whole[at:]
    return found


def _end(text: bytes, at: int, raw: bytes, shown: bytes) -> int:
    """Return the position in a text at which the part of a token ends.

    Args:
        text: The text.
        at: Position at which the token begins.
        raw: Bytes of the token.
        shown: The token decoded by itself, in UTF-8.
    """
    for one in (raw, shown):
        there = text[at : at + len(one)]
        if there and one.startswith(there):
            return at + len(there)
    start = text.find(raw, at, at + _NEAR) if raw else -1
    return at if start < 0 else start + len(raw)


def bytes_of_piece(piece: str) -> bytes | None:
    """Return the bytes that a vocabulary's piece with a part of a character stands for; None for other pieces."""
    byte = _BYTE.fullmatch(piece)
    if byte is not None:
        return bytes([int(byte[1], 16)])
    found = [_OF_SYMBOL.get(one) for one in piece]
    return None if None in found else bytes(one for one in found if one is not None)


def _byte_symbols() -> dict[str, int]:
    """Return the byte of each character in vocabularies of byte-level pairs; invisible bytes get other characters."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(0x100) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(0x100 + i): byte for i, byte in enumerate(moved)}


_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # of SentencePiece
_OF_SYMBOL = _byte_symbols()
