"""SA-1: words that must not come, as tokens: in the middle of a text a word may begin with another token."""

from __future__ import annotations

import pytest

from megatron_ext.config.differences import EMBEDDED_MODEL_DIR
from megatron_ext.errors import ConfigError
from megatron_ext.text.tokenizer import NullTokenizer, TextTokenizer, word_tokens

TOKENIZER = TextTokenizer(EMBEDDED_MODEL_DIR)


@pytest.mark.parametrize("word", ["list", "return", "json.loads"])
def test_two_beginnings(word):
    ways = word_tokens(TOKENIZER, word)
    assert [TOKENIZER.detokenize(list(way)) for way in ways] == [word, f" {word}"]
    assert ways[0][0] != ways[1][0]
    assert ways[0] in {tuple(TOKENIZER.tokenize(f"({word}")[-len(ways[0]) :])}


@pytest.mark.parametrize("word", [" list", "\n"])
def test_one_beginning(word):
    assert word_tokens(TOKENIZER, word) == [tuple(TOKENIZER.tokenize_plain(word))]


def test_words_of_others():
    assert word_tokens(NullTokenizer(9), "3 4") == [(3, 4)]
    with pytest.raises(ConfigError, match="no token for ' '"):
        word_tokens(NullTokenizer(9), " ")
