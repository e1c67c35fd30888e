"""Megatron-LM tokenizers other than Hugging Face's, and tokenizer objects of a caller's program.

`TikTokenizer` needs the package tiktoken, the SentencePiece kinds need sentencepiece; the package's extra `tokenizers`
installs both. GPT-2's byte pairs are read by `tokenizers`: megatron-core's class for them uses the network.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from megatron_ext.errors import ConfigError
from megatron_ext.files import open_regular, read_text
from megatron_ext.text.rust_panics import panics_as_errors
from megatron_ext.text.tokenizer import FastBackend, NullTokenizer, Tokenizer
from megatron_ext.text.tokenizer_files import LONGEST_FILE

DEFAULT_PATTERN, DEFAULT_SPECIAL_TOKENS = "v2", 1000
TIKTOKEN_IDS = 2**17  # default of a TikTokenizer, special tokens included
_END_OF_TEXT = "<|endoftext|>"  # end of document of GPT-2
_BYTES = 256  # the first tokens of a TikTokenizer's file


class TikTokenizer:
    """Byte pair tokenizer with a splitting pattern; `</s>`, token 2, ends a document.

    Special tokens have the first ids, before the file's ids. A text that spells a special token is encoded as that
    token, as in Megatron.

    Args:
        path: JSON list of objects with `rank`, `token_bytes` in base64, and `token_str`.
        pattern: Pattern that splits a text before pairs are merged, `v1` or `v2`.
        special_tokens: Number of ids before the file's ids.
        vocab_size: Maximum number of ids; further entries of the file are dropped.

    Raises:
        ConfigError: The package is missing, or the file is invalid.
    """

    def __init__(
        self,
        path: Path,
        pattern: str = DEFAULT_PATTERN,
        special_tokens: int = DEFAULT_SPECIAL_TOKENS,
        vocab_size: int = TIKTOKEN_IDS,
    ) -> None:
        _require_package("tiktoken", "TikTokenizer")
        size = min(vocab_size, special_tokens + _entries(path))
        if size <= special_tokens + _BYTES - 1:
            raise ConfigError(
                f"{path}: {special_tokens} special tokens leave {max(0, size - special_tokens)} of {size} ids to the "
                f"file, and its first {_BYTES} are the bytes; give fewer --tiktoken-num-special-tokens or a larger "
                "--vocab-size"
            )
        from megatron.core.tokenizers.text.libraries import TikTokenTokenizer

        try:
            self._wrapped = TikTokenTokenizer(
                str(path), num_special_tokens=special_tokens, pattern=pattern, vocab_size=size
            )
        except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:  # it asserts
            raise ConfigError(f"{path} is not a vocabulary for a TikTokenizer: {_reason(error)}") from error
        self.files, self.pattern, self.special_tokens = (path,), pattern, special_tokens
        self.vocab_size, self.token_ids = size, range(size)
        self.eod: int | None = self._wrapped.eos_id
        self.bos: int | None = self._wrapped.bos_id

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of a text, without a beginning of document."""
        return list(self._wrapped.text_to_ids(text))

    def detokenize(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ids. Invalid bytes become U+FFFD."""
        shown = [token for token in ids if token >= self.special_tokens] if skip_special_tokens else ids
        text: str = self._wrapped.tokenizer.decode(shown)
        return text

    def piece_of(self, token: int) -> bytes:
        """Return the bytes of a token."""
        return bytes(self._wrapped.tokenizer.decode_single_token_bytes(token))


class SentencePieceTokenizer:
    """SentencePiece model, as of Llama 2; adds no beginning of document, as in Megatron.

    Args:
        path: Model file.

    Raises:
        ConfigError: The package is missing, or the file is invalid.
    """

    def __init__(self, path: Path) -> None:
        _require_package("sentencepiece", "SentencePieceTokenizer and Llama2Tokenizer")
        _require_file(path)
        from megatron.core.tokenizers.text.libraries import SentencePieceTokenizer as Wrapped

        try:
            self._wrapped = Wrapped(str(path))
        except (OSError, RuntimeError, ValueError) as error:
            raise ConfigError(f"{path} is not a SentencePiece model: {_reason(error)}") from error
        self.files = (path,)
        pieces = self._wrapped.tokenizer
        self.vocab_size = pieces.get_piece_size()
        self.token_ids = range(self.vocab_size)
        self._control = {token: pieces.id_to_piece(token) for token in self.token_ids if pieces.is_control(token)}
        eos, bos = pieces.eos_id(), pieces.bos_id()  # -1 without such a token
        self.eod: int | None = eos if eos >= 0 else None
        self.bos: int | None = bos if bos >= 0 else None

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of a text, without a beginning of document."""
        return list(self._wrapped.text_to_ids(text))

    def detokenize(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ids; control tokens are spelled out unless skipped."""
        if skip_special_tokens:
            return str(self._wrapped.ids_to_text(list(ids)))
        parts: list[str] = []
        start = 0
        for index, token in enumerate([*ids, None]):
            if token is None or token in self._control:
                parts.append(str(self._wrapped.ids_to_text(list(ids[start:index]))) if index > start else "")
                parts.append(self._control[token] if token is not None else "")
                start = index + 1
        return "".join(parts)

    def piece_of(self, token: int) -> str:
        """Return a token as the vocabulary spells it."""
        return str(self._wrapped.tokenizer.id_to_piece(token))


class Gpt2Tokenizer:
    """GPT-2's byte pair tokenizer; `<|endoftext|>` ends a document.

    Args:
        vocab_file: `vocab.json`.
        merge_file: `merges.txt`.

    Raises:
        ConfigError: The files are invalid.
    """

    bos: int | None = None

    def __init__(self, vocab_file: Path, merge_file: Path) -> None:
        import tokenizers

        for file in (vocab_file, merge_file):
            _require_file(file)
        with panics_as_errors(f"{vocab_file} and {merge_file} cannot be read"):
            try:
                model = tokenizers.models.BPE.from_file(str(vocab_file), str(merge_file))
            except Exception as error:  # `tokenizers` raises bare Exception
                raise ConfigError(f"{vocab_file} and {merge_file} are not byte pairs: {_reason(error)}") from error
        self.files = (vocab_file, merge_file)
        wrapped = tokenizers.Tokenizer(model)
        wrapped.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        wrapped.decoder = tokenizers.decoders.ByteLevel()
        self.eod: int | None = wrapped.token_to_id(_END_OF_TEXT)
        if self.eod is not None:
            wrapped.add_special_tokens([_END_OF_TEXT])
        self._backend = FastBackend(wrapped)
        self.vocab_size, self.token_ids = self._backend.vocab_size, self._backend.token_ids

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of a text."""
        return self._backend.encode(text)

    def detokenize(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ids."""
        return self._backend.decode(ids, skip_special_tokens)

    def piece_of(self, token: int) -> str | None:
        """Return a token as the vocabulary spells it."""
        return self._backend.piece_of(token)


def _require_package(name: str, kind: str) -> None:
    if importlib.util.find_spec(name) is None:
        raise ConfigError(f"{kind} needs the package {name}, which is not installed; install the extra [tokenizers]")


def _require_file(path: Path) -> None:
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
    if size > LONGEST_FILE:
        raise ConfigError(f"{path}: {size} bytes; a tokenizer's file must have at most {LONGEST_FILE}")


def _entries(path: Path) -> int:
    """Return the tokens of a TikTokenizer's file."""
    if path.suffix != ".json":
        raise ConfigError(f"{path} is not a vocabulary for a TikTokenizer; Megatron reads names that end with .json")
    try:
        listed: object = json.loads(read_text(path, LONGEST_FILE))
    except (ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} is not a vocabulary for a TikTokenizer: not JSON: {_reason(error)}") from error
    if not isinstance(listed, Sequence) or isinstance(listed, str):
        raise ConfigError(f"{path} is not a vocabulary for a TikTokenizer: not a list of tokens")
    return len(listed)


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


_METHODS = ("tokenize", "detokenize")


class AdaptedTokenizer:
    """Tokenizer with the methods that megatron-core's tokenizers have in common.

    Args:
        wrapped: Has `tokenize`, `detokenize` and `vocab_size`, and `eod` (or `eos_id`) and `bos` (or `bos_id`) if there
            are such tokens.

    Raises:
        ConfigError: A method is missing.
    """

    def __init__(self, wrapped: object) -> None:
        missing = [name for name in _METHODS if not callable(getattr(wrapped, name, None))]
        size = getattr(wrapped, "vocab_size", None)
        if missing or not isinstance(size, int) or size <= 0:
            name = missing[0] if missing else "vocab_size"
            raise ConfigError(
                f"the tokenizer is of class {type(wrapped).__name__}, which has no {name}; give one of megatron-core, "
                "one of this package, or None for prompts of token ids"
            )
        self._wrapped = cast("Any", wrapped)
        self.vocab_size, self.token_ids = size, range(size)
        self.eod = _token_of(wrapped, "eod", "eos_id")
        self.bos = _token_of(wrapped, "bos", "bos_id")
        self._skips = "skip_special_tokens" in inspect.signature(self._wrapped.detokenize).parameters

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of a text."""
        return [int(token) for token in self._wrapped.tokenize(text)]

    def detokenize(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ids, without special tokens unless requested.

        Only the beginning and the end of a document are left out if the wrapped tokenizer cannot do so itself.
        """
        if self._skips:
            return str(self._wrapped.detokenize(ids, skip_special_tokens=skip_special_tokens))
        if skip_special_tokens:
            ids = [token for token in ids if token not in (self.eod, self.bos)]
        return str(self._wrapped.detokenize(ids))


def adapted(tokenizer: object, vocab_size: int) -> Tokenizer:
    """Return a tokenizer with this package's interface.

    Args:
        tokenizer: One of this package or of megatron-core; None for a `NullTokenizer`.
        vocab_size: Rows of the model's embedding.

    Raises:
        ConfigError: The tokenizer lacks a method, or has more ids than the model.
    """
    if tokenizer is None:
        return NullTokenizer(vocab_size)
    given: Any = tokenizer
    found: Tokenizer = given if hasattr(given, "token_ids") else AdaptedTokenizer(given)
    if found.vocab_size > vocab_size:
        raise ConfigError(f"the tokenizer has {found.vocab_size} ids, the model {vocab_size}; give another tokenizer")
    return found


def _token_of(tokenizer: object, *names: str) -> int | None:
    """Return the first token that a tokenizer has under one of the names; some raise an error for a missing one."""
    for name in names:
        try:
            found = getattr(tokenizer, name, None)
        except (NotImplementedError, KeyError, ValueError):
            continue
        if isinstance(found, int) and found >= 0:
            return found
    return None
