"""SI-5: text around a place in a list of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

import megatron_ext.models
from megatron_ext.text.detokenizer import SHOWN, excerpt
from megatron_ext.text.tokenizer import TextTokenizer

EMBEDDED = Path(megatron_ext.models.__file__).parent / "embedded_model"
TEXT = "".join(f"{number}: Größe, 東京, 👩‍👩‍👧, \n🎉\t" for number in range(40))  # characters of one to four bytes


def decode_bytes(ids: Sequence[int], skip_special_tokens: bool = True) -> str:
    """Decode tokens each of which is a byte."""
    return bytes(ids).decode(errors="replace")


@pytest.mark.parametrize("length", [3, 41, len(TEXT)])
def test_every_place_in_bytes(length: int):
    """A place inside a character is before it; nothing else is lost, at either end of the text."""
    text = TEXT[:length]
    tokens = list(text.encode())
    for place in range(len(tokens) + 1):
        known = len(bytes(tokens[:place]).decode(errors="ignore"))
        expected = (text[max(0, known - SHOWN) : known], text[known : known + SHOWN])
        assert excerpt(tokens, place, decode_bytes) == expected, place


def test_every_place_in_tokens_of_the_embedded_model():
    tokenizer = TextTokenizer(EMBEDDED)
    tokens = tokenizer.tokenize(TEXT)
    for place in range(len(tokens) + 1):
        before, after = excerpt(tokens, place, tokenizer.detokenize)
        known = len(tokenizer.detokenize(tokens[:place]).rstrip("\ufffd"))
        assert (before, after) == (TEXT[max(0, known - SHOWN) : known], TEXT[known : known + SHOWN]), place


def test_invalid_bytes_before_the_place_move_it_back():
    """Bytes that are no character are shown after the mark, and both sides together are the whole text."""
    tokens = list(b"ab\xffcd")
    assert excerpt(tokens, 3, decode_bytes) == ("ab", "\ufffdcd")
    assert excerpt(tokens, 4, decode_bytes) == ("ab\ufffdc", "d")
