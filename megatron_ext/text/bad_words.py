"""Token sequences of words that must not be generated."""

from __future__ import annotations

from megatron_ext.errors import ConfigError
from megatron_ext.text.tokenizer import TextTokenizer, Tokenizer


def word_tokens(tokenizer: Tokenizer, word: str) -> list[tuple[int, ...]]:
    """Return the tokenizations of a word: as it stands, and after a space if that changes its first token.

    Other ways to split the word are not excluded. vLLM's `bad_words` behave alike, except for words whose number of
    tokens changes after a space.

    Args:
        tokenizer: Tokenizer of the model.
        word: Non-empty word.

    Raises:
        ConfigError: The tokenizer makes no token of the word, or cannot read it.
    """
    plain = _tokens(tokenizer, word)
    if not plain:
        raise ConfigError(f"bad_words: the tokenizer returns no token for {word!r}; leave it out")
    if not isinstance(tokenizer, TextTokenizer) or word[0].isspace():
        return [plain]
    after_space = _tokens(tokenizer, " " + word)
    return [plain, after_space] if after_space[0] != plain[0] else [plain]


def _tokens(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Return the ids of a text without tokens added around it."""
    if isinstance(tokenizer, TextTokenizer):
        return tuple(tokenizer.tokenize_plain(text))
    return tuple(tokenizer.tokenize(text))
