"""Tokenizers whose texts a test can choose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_ext.errors import ConfigError


class PieceTokenizer:
    """Token i reads as `pieces[i]`; tokens without a piece read as "<i>". Tokenises greedily, longest piece first.

    Where pieces overlap ("a", "b", "ab") one text has several tokenisations; `tokenize` gives one of them.
    """

    eod: int | None = None
    bos: int | None = None

    def __init__(self, vocab_size: int, pieces: Mapping[int, str] | None = None) -> None:
        self.vocab_size = vocab_size
        self._pieces = {i: f"<{i}>" for i in range(vocab_size)} | dict(pieces or {})
        self._longest_first = sorted(self._pieces.items(), key=lambda item: -len(item[1]))

    def tokenize(self, text: str) -> list[int]:
        ids = []
        while text:
            fitting = (one for one in self._longest_first if text.startswith(one[1]))
            token, piece = next(fitting, (None, ""))
            if token is None:
                raise ConfigError(f"{text[:20]!r} begins with no piece of the vocabulary")
            ids.append(token)
            text = text[len(piece) :]
        return ids

    def detokenize(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(self._pieces[i] for i in ids)
