"""Words that must not be generated, as tokens."""

from __future__ import annotations

from megatron_ext.errors import ConfigError
from megatron_ext.text.tokenizer import TextTokenizer, Tokenizer


def word_tokens(tokenizer: Tokenizer, word: str) -> list[tuple[int, ...]]:
    """The ways in which a word can be tokens: as it stands, and behind a space where that makes it begin otherwise.

    Other ways to cut it are not ruled out. vLLM's `bad_words` mean the same, but for words that have another number of
    tokens behind a space.

    Args:
        tokenizer: Of the model.
        word: Not empty.

    Raises:
        ConfigError: The tokenizer makes no token of it, or cannot read it.
    """
    plain = _tokens(tokenizer, word)
    if not plain:
        raise ConfigError(f"bad_words: the tokenizer makes no token of {word!r}; leave it out")
    if not isinstance(tokenizer, TextTokenizer) or word[0].isspace():
        return [plain]
    behind_space = _tokens(tokenizer, " " + word)
    return [plain, behind_space] if behind_space[0] != plain[0] else [plain]


def _tokens(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Without what the tokenizer puts around a text."""
    if isinstance(tokenizer, TextTokenizer):
        return tuple(tokenizer.tokenize_plain(text))
    return tuple(tokenizer.tokenize(text))
