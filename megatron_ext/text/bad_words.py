"""Words that must not be generated, as tokens."""

from __future__ import annotations

from megatron_ext.errors import ConfigError
from megatron_ext.text.tokenizer import TextTokenizer, Tokenizer


def word_tokens(tokenizer: Tokenizer, word: str) -> list[tuple[int, ...]]:
    """The ways in which a word can be tokens: as it stands, and behind a space where that makes it begin otherwise.

    Other ways to cut it are not ruled out. This is what vLLM's `bad_words` mean.

    Args:
        tokenizer: Of the model.
        word: Not empty.

    Raises:
        ConfigError: The tokenizer makes no token of it, or cannot read it.
    """
    plain = _tokens(tokenizer, word)
    if not plain:
        raise ConfigError(f"bad_words: the tokenizer makes no token of {word!r}; leave it out")
    if not isinstance(tokenizer, TextTokenizer):
        return [plain]
    behind_space = _tokens(tokenizer, " " + word.lstrip())
    has_two = len(behind_space) == len(plain) and behind_space[0] != plain[0]
    return [plain, behind_space] if has_two else [plain]


def _tokens(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Without what the tokenizer puts around a text."""
    if isinstance(tokenizer, TextTokenizer):
        return tuple(tokenizer.tokenize_plain(text))
    return tuple(tokenizer.tokenize(text))
