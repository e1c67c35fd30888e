"""Tokenization of prompts, with at most one beginning of document, and of words that must not be generated."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_ext.errors import ConfigError
from megatron_ext.text.tokenizer import TextTokenizer, Tokenizer


def tokenize_prompt(tokenizer: Tokenizer, text: str, *, add_bos: bool = False) -> list[int]:
    """Return the ids of a text as its tokenizer gives them, with at most one beginning of document.

    Args:
        tokenizer: Tokenizer of the model.
        text: Prompt.
        add_bos: Whether to add the beginning of document if the tokenizer does not.

    Raises:
        ConfigError: `add_bos` is set but the tokenizer has no such token, or it cannot read the text.
    """
    if add_bos and tokenizer.bos is None:
        raise ConfigError("add_BOS is set, but the tokenizer has no beginning-of-document token; leave it out")
    return begin_once(tokenizer.tokenize(text), tokenizer.bos, add_bos=add_bos)


def begin_once(tokens: Sequence[int], bos: int | None, *, add_bos: bool = False) -> list[int]:
    """Return the tokens with exactly one beginning of document, if they have any or it is to be added.

    A text that spells it, as chat templates do, may get a second one from the tokenizer.

    Args:
        tokens: Tokens of a prompt.
        bos: Token that begins a document; None if there is no such token.
        add_bos: Whether to add it in any case; `bos` is not None then.
    """
    spelled = next((i for i, token in enumerate(tokens) if token != bos), len(tokens))
    beginning = [] if bos is None or not (add_bos or spelled) else [bos]
    return [*beginning, *tokens[spelled:]]


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
