"""Backends of `TextTokenizer`: `tokenizers` for a `tokenizer.json`, `transformers` for older formats."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_ext.errors import ConfigError
from megatron_ext.files import read_text
from megatron_ext.text.rust_panics import CANNOT_DECODE, CANNOT_ENCODE, panics_as_errors
from megatron_ext.text.tokenizer_files import LONGEST_FILE, check_files, has_tokenizer, no_tokenizer


class _Backend:
    """Loaded tokenizer of a library.

    Args:
        wrapped: Object of the library.
        vocabulary: Ids by token, added tokens included.
    """

    def __init__(self, wrapped: Any, vocabulary: Mapping[str, int]) -> None:
        self.wrapped = wrapped
        self.vocab_size, self.token_ids = _extent(vocabulary.values())
        self.longest_token = max(map(len, vocabulary), default=0)


class FastBackend(_Backend):
    """Backend of a `tokenizer.json`."""

    def __init__(self, file: Path) -> None:
        import tokenizers

        text = read_text(file, LONGEST_FILE)
        with panics_as_errors(f"{file} cannot be read"):
            try:
                tokenizer = tokenizers.Tokenizer.from_str(text)
            except Exception as error:  # `tokenizers` raises bare Exception
                raise ConfigError(f"{file} is not a tokenizer: {error}") from error
        # Saved truncation and padding are for training batches: a prompt is neither truncated nor padded.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        super().__init__(tokenizer, tokenizer.get_vocab(with_added_tokens=True))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text, with or without the special tokens that the tokenizer adds."""
        # `encode` holds Python's lock: 8 MB of text stopped all threads for 7 to 20 s.
        with panics_as_errors(CANNOT_ENCODE):
            (encoding,) = self.wrapped.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        """Return the text of ids."""
        with panics_as_errors(CANNOT_DECODE):
            return self.wrapped.decode(ids, skip_special_tokens=skip_special_tokens)

    @property
    def serialized(self) -> str:
        """Contents of a `tokenizer.json`."""
        return self.wrapped.to_str()

    def id_of(self, token: str) -> int | None:
        """Return the id of a token's text."""
        return self.wrapped.token_to_id(token)

    def piece_of(self, token: int) -> str | None:
        """Return a token as the vocabulary spells it."""
        return self.wrapped.id_to_token(token)


class AutoBackend(_Backend):
    """Backend of a directory in an older format."""

    def __init__(self, directory: Path) -> None:
        if not has_tokenizer(directory):
            raise ConfigError(no_tokenizer(directory))
        brings_code = check_files(directory)
        from transformers import AutoTokenizer

        with panics_as_errors(f"{directory}: the tokenizer cannot be read"):
            try:
                tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
            except Exception as error:  # transformers may raise anything for untrusted files
                reason = "it has custom code (auto_map), which is never run" if brings_code else _first_line(error)
                raise ConfigError(f"{directory}: the tokenizer cannot be read: {reason}") from error
        super().__init__(tokenizer, tokenizer.get_vocab())

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text, with or without the special tokens that the tokenizer adds."""
        with panics_as_errors(CANNOT_ENCODE):
            return self.wrapped.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        """Return the text of ids."""
        with panics_as_errors(CANNOT_DECODE):
            return self.wrapped.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)

    @property
    def serialized(self) -> str | None:
        """Contents of a `tokenizer.json`; None for a tokenizer written in Python."""
        return self.wrapped.backend_tokenizer.to_str() if self.wrapped.is_fast else None

    def id_of(self, token: str) -> int | None:
        """Return the id of a token's text."""
        return self.wrapped.get_vocab().get(token)

    def piece_of(self, token: int) -> str | None:
        """Return a token as the vocabulary spells it."""
        return self.wrapped.convert_ids_to_tokens(token)


def _extent(ids: Iterable[int]) -> tuple[int, range | frozenset[int]]:
    """Return the exclusive upper bound of the ids, and the ids."""
    known = frozenset(ids)
    size = 1 + max(known, default=-1)
    return size, range(size) if len(known) == size else known


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]
