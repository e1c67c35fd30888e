"""Parts of a text, sent early: joined they are the text, and no part is sent that a stop word removes."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from megatron_ext.config.differences import EMBEDDED_MODEL_DIR
from megatron_ext.text import detokenizer
from megatron_ext.text.detokenizer import INCOMPLETE, IncrementalDetokenizer, StopWordMatcher, TextStream
from megatron_ext.text.tokenizer import TextTokenizer
from tests.unit_tests.text.test_stop_words import PIECE_IDS, TOKENIZER, spell


def decode(tokens: list[int], skip_special_tokens: bool = True) -> str:
    return TOKENIZER.decode(list(tokens), skip_special_tokens=skip_special_tokens)


def stream(words: list[str], tokens: list[int], detokenize=decode, skip=()) -> tuple[list[str], str]:
    """The parts that a request with these tokens would send, and the text of its record."""
    matcher = StopWordMatcher(words, detokenize) if words else None
    parts = TextStream(words, detokenize)
    sent, waiting = [], []
    for count, token in enumerate(tokens, start=1):
        text = matcher.feed([token]) if words else None
        if text is not None:
            return [*sent, parts.finish(text)], text
        if count == len(tokens):
            break
        waiting.append(token)
        if count not in skip:
            sent.append(parts.feed(waiting))
            waiting = []
    text = detokenize(tokens)
    return [*sent, parts.finish(text)], text


def test_each_token_is_sent_when_it_comes():
    assert stream([], spell(*"hello"))[0] == list("hello")


def test_bytes_of_a_character_wait_for_the_last_one():
    parts, text = stream([], [*"€".encode(), *spell("a", "é".encode(), "!")])
    assert parts == ["", "", "€", "a", "é", "!"]
    assert text == "€aé!"


def test_a_possible_stop_word_is_withheld():
    assert stream(["abc"], spell(*"xabdabcz"))[0] == ["x", "", "", "abd", "", "", ""]
    assert stream(["abc"], spell(*"ab"))[0] == ["", "ab"]


def test_special_tokens_are_seen_and_not_sent():
    """A stop word may be a special token; others are passed over, and the space after them stays."""
    tokenizer = TextTokenizer(EMBEDDED_MODEL_DIR)
    tokens = tokenizer.tokenize("One<|user|> two<|end|>three")
    parts, text = stream(["<|end|>"], tokens, tokenizer.detokenize)
    assert "".join(parts) == text == "One two"
    assert "".join(stream([], tokens, tokenizer.detokenize)[0]) == "One twothree"


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(["<|end|>", "<|user|>", " word", "é", "a", "b"]), min_size=1, max_size=16),
    st.lists(st.sampled_from(["ab", "a word", "éa", "b<|end|>", "<|user|>"]), max_size=3),
)
def test_a_stop_word_across_hidden_tokens_is_withheld(pieces, words):
    tokenizer = TestCost.TOKENIZER
    tokens = [token for piece in pieces for token in tokenizer.tokenize(piece)]
    sent, text = stream(words, tokens, tokenizer.detokenize)
    assert "".join(sent) == text
    assert not any(word in text for word in words)


def test_bytes_that_are_no_text_do_not_wait_for_ever():
    tokens = [0x80] * 40 + spell("a", "b")
    fed = TextStream([], decode)
    sent = [fed.feed([token]) for token in tokens[:-1]]
    assert any(sent[:40]), "the first of them are settled"
    assert "".join(sent) + fed.finish(decode(tokens)) == decode(tokens)


class TestCost:
    """SE-2: cost of a token, counted in decoded tokens, which does not depend on the tokens before it."""

    TOKENIZER = TextTokenizer(EMBEDDED_MODEL_DIR)

    @pytest.fixture(params=["stream", "stop words"])
    def decoded(self, request) -> Callable[[list[int]], list[int]]:
        """A function: how many tokens were decoded for each token of a generation."""

        def run(tokens: list[int]) -> list[int]:
            counts = []

            def counting(ids: list[int], skip_special_tokens: bool = True) -> str:
                counts[-1] += len(ids)
                return self.TOKENIZER.detokenize(ids, skip_special_tokens)

            words = ["never found"]
            feed = (TextStream if request.param == "stream" else StopWordMatcher)(words, counting).feed
            for token in tokens:
                counts.append(0)
                feed([token])
            return counts

        return run

    @pytest.mark.parametrize("text", [" word", "<|end|>", "<|end|> word", "é"])
    def test_it_does_not_grow(self, decoded, text):
        """The cost does not grow even if all tokens are special ones, as with `ignore_eos`."""
        tokens = self.TOKENIZER.tokenize(text * 300)
        counts = decoded(tokens)
        assert max(counts[len(counts) // 2 :]) == max(counts[:40])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["<|end|>", "<|user|>", " word", "é", "a", " ", "\n"]), max_size=24))
def test_special_tokens_between_do_not_change_the_text(parts):
    """Runs of them at the start, in the middle and at the end."""
    tokenizer = TestCost.TOKENIZER
    tokens = [token for part in parts for token in tokenizer.tokenize(part)]
    sent, text = stream([], tokens, tokenizer.detokenize)
    assert "".join(sent) == text == tokenizer.detokenize(tokens)
    fed = IncrementalDetokenizer(tokenizer.detokenize)
    visible = "".join(piece.visible for piece in fed.feed(tokens)) + fed.tail
    assert visible == tokenizer.detokenize(tokens, skip_special_tokens=False)


TOKENS = st.lists(
    st.sampled_from([*range(97, 103), 32, 0x80, 0xC3, 0xA9, *PIECE_IDS.values()]), min_size=1, max_size=40
)
WORDS = st.lists(st.text("abcdEND €\n", min_size=1, max_size=4), max_size=3)


@settings(max_examples=100, deadline=None)
@given(TOKENS, WORDS, st.sets(st.integers(1, 40)))
def test_the_parts_are_the_text(tokens, words, skip):
    parts, text = stream(words, tokens, skip=skip)
    assert "".join(parts) == text
    assert not any(part.endswith(INCOMPLETE) for part in parts[:-1] if len(part) < 2)


@pytest.mark.parametrize("mistake", ["no holding back", "one character too few"])
def test_negative_controls(monkeypatch, mistake):
    overlap = detokenizer.overlap
    monkeypatch.setattr(
        detokenizer, "overlap", lambda *pair: 0 if mistake == "no holding back" else max(0, overlap(*pair) - 1)
    )
    parts, text = stream(["abc"], spell(*"xabc"))
    assert "".join(parts) != text
