"""Bytes of tokens in a text, of tokenizers that write them in different ways."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from tokenizers import decoders

from megatron_ext.config.differences import EMBEDDED_MODEL_DIR
from megatron_ext.text.detokenizer import INCOMPLETE
from megatron_ext.text.tokenizer import TextTokenizer
from megatron_ext.text.vocabulary import Vocabulary, bytes_in_text
from tests.unit_tests.text.test_stop_words import PIECES, TOKENIZER, as_bytes, spell


class ByteLevel:
    """The tokenizer of `test_stop_words`."""

    vocab_size = 256 + len(PIECES)

    def detokenize(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return TOKENIZER.decode(list(ids), skip_special_tokens=False)

    def piece_of(self, token: int) -> str | None:
        return TOKENIZER.id_to_token(token)


class SentencePieces:
    """Tokens as SentencePiece writes them: bytes, and words whose space is dropped at the beginning of a text."""

    WORDS = ("▁a", "▁世", "b", "▁", "▁▁x")
    DECODER = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    vocab_size = 256 + len(WORDS)

    def detokenize(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return self.DECODER.decode([self.piece_of(token) for token in ids])

    def piece_of(self, token: int) -> str:
        return f"<0x{token:02X}>" if token < 256 else self.WORDS[token - 256]


EMBEDDED = TextTokenizer(EMBEDDED_MODEL_DIR)
TOKENIZERS = (ByteLevel(), SentencePieces(), EMBEDDED)
VALID = st.text("a é世\U0001f600", max_size=8)


def vocabulary(tokenizer: object) -> Vocabulary:
    return Vocabulary(tokenizer, tokenizer.vocab_size)


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=lambda one: type(one).__name__)
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_the_bytes_are_the_text(tokenizer, data):
    """Whatever tokens come, cut anywhere."""
    ids = st.integers(0, 255) | st.integers(256, tokenizer.vocab_size - 1) | st.sampled_from([0xC3, 0xA9, 0xF0])
    tokens = data.draw(st.lists(ids, min_size=1, max_size=24))
    text = tokenizer.detokenize(tokens)
    cut = text[: data.draw(st.integers(0, len(text)))]
    found = bytes_in_text(vocabulary(tokenizer), tokens, cut)
    assert b"".join(found) == cut.encode()
    assert len(found) == len(tokens)


@settings(max_examples=50, deadline=None)
@given(st.lists(VALID | st.sampled_from(PIECES), max_size=8))
def test_parts_of_characters_have_their_own_bytes(pieces):
    tokens = spell(*pieces)
    text = ByteLevel().detokenize(tokens)
    if INCOMPLETE not in text:
        own = [bytes([token]) if token < 256 else as_bytes(PIECES[token - 256]) for token in tokens]
        assert bytes_in_text(vocabulary(ByteLevel()), tokens, text) == own


def test_tokens_that_are_not_shown_have_no_bytes():
    tokens = EMBEDDED.tokenize("a<|user|>é<|end|>b")
    shown = bytes_in_text(vocabulary(EMBEDDED), tokens, "aéb")
    assert [one for one in shown if one] == [b"a", b"\xc3", b"\xa9", b"b"]
    assert len(shown) == 6
    assert len([one for one in bytes_in_text(vocabulary(EMBEDDED), tokens, "a<|user|>é<|end|>b") if one]) == 6
