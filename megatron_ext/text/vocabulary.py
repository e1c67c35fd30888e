"""Vocabulary: token ids that have text, and the bytes of single tokens, parts of a character included.

A model's vocabulary may be padded, and a tokenizer's ids may have gaps.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from megatron_ext.errors import ConfigError
from megatron_ext.text.detokenizer import INCOMPLETE


class Vocabulary:
    """Ids of a model that have a token in its tokenizer, which is never called with other ids.

    Other ids are refused in prompts, and generated ones decode to empty text.

    Args:
        tokenizer: Tokenizer. Its `token_ids`, a range or a set, have a token; without this attribute those below its
            `vocab_size`, and without that one all of the model's.
        model_size: Vocabulary size of the model, padding included.
    """

    def __init__(self, tokenizer: Any, model_size: int) -> None:
        self._tokenizer = tokenizer
        self._model_size = model_size
        below = getattr(tokenizer, "vocab_size", None) or model_size
        self._ids: range | frozenset[int] = getattr(tokenizer, "token_ids", range(below))
        if isinstance(self._ids, range):
            self._ids = range(min(len(self._ids), model_size))

    @property
    def ids(self) -> Sequence[int]:
        """Ids that have a token, in order."""
        if isinstance(self._ids, range):
            return self._ids
        return sorted(token for token in self._ids if token < self._model_size)

    def has_tokens(self, ids: Sequence[int]) -> bool:
        """Return whether every id is one of the model's, and has a token."""
        if not ids:
            return True
        if isinstance(self._ids, range):
            return min(ids) >= 0 and max(ids) < len(self._ids)
        return max(ids) < self._model_size and self._ids.issuperset(ids)

    def check_biased(self, ids: Sequence[int]) -> None:
        """Check that logits of these ids can be changed.

        Raises:
            ConfigError: An id is outside the model's vocabulary.
        """
        outside = next((token for token in ids if token >= self._model_size), None)
        if outside is not None:
            raise ConfigError(
                f"logit_bias: token id {outside} is not in the vocabulary of {self._model_size}; "
                f"ids go from 0 to {self._model_size - 1}"
            )

    def check_prompt(self, ids: Sequence[int]) -> None:
        """Check that a prompt of these ids can be served.

        Raises:
            ConfigError: An id is outside the model's vocabulary, or has no token in the tokenizer.
        """
        if self.has_tokens(ids):
            return
        last = self._model_size - 1
        outside = next((token for token in ids if not 0 <= token <= last), None)
        if outside is not None:
            raise ConfigError(
                f"token id {outside} is not in the vocabulary of {self._model_size}; ids go from 0 to {last}"
            )
        bad = next(token for token in ids if token not in self._ids)
        raise ConfigError(
            f"token id {bad} has no token in the tokenizer, which ends at {max(self._ids)}; the model's vocabulary "
            f"of {self._model_size} has padding or gaps there"
        )

    def token_text(self, token: int) -> str:
        """Return the text of a single token, special or not."""
        return self.detokenize([token], skip_special_tokens=False)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a single token, special or not, which may be a part of a character."""
        text = self.token_text(token)
        piece_of = getattr(self._tokenizer, "piece_of", None) if INCOMPLETE in text else None
        piece = None if piece_of is None else piece_of(token)
        known = piece if isinstance(piece, bytes) else None if piece is None else bytes_of_piece(piece)
        return text.encode() if known is None else known

    def decoder(self, *, skips_special: bool = True) -> Callable[..., str]:
        """Return `detokenize`, or a variant that always shows special tokens."""
        return self.detokenize if skips_special else partial(self.detokenize, skip_special_tokens=False)

    def detokenize(self, ids: Sequence[int], **options: object) -> str:
        """Return the text of the ids that have a token.

        Args:
            ids: Any ids.
            options: Options of the tokenizer.
        """
        if not self.has_tokens(ids):
            ids = [token for token in ids if token < self._model_size and token in self._ids]
        return self._tokenizer.detokenize(ids, **options)


_NEAR = 64  # bytes; a decoder may write spaces between two tokens


def bytes_in_text(vocabulary: Vocabulary, tokens: Sequence[int], text: str) -> list[bytes]:
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
