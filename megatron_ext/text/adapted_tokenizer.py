"""Tokenizer objects of a caller's program, such as megatron-core's, with this package's interface."""

from __future__ import annotations

import inspect
from typing import Any, cast

from megatron_ext.errors import ConfigError
from megatron_ext.text.tokenizer import NullTokenizer, Tokenizer

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
