"""Stop words on a byte-level tokenizer: characters and words cut into tokens anywhere, bytes that are no text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from megatron_ext.text.detokenizer import INCOMPLETE, StopWordMatcher

# Tokens 0 to 255 are the bytes; these follow. Some end, begin or lie within a character.
HEAD, TAIL = "€".encode()[:2], "€".encode()[2:]
PIECES = ("EN", "ND", " END", "é".encode(), HEAD, TAIL + b"!", TAIL + HEAD, "ab", "bc", "\n\n")


def byte_symbols() -> list[str]:
    """The visible character that byte-level BPE writes for each byte (as GPT-2 does)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    symbols = {byte: chr(byte) for byte in shown} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}
    return [symbols[byte] for byte in range(256)]


SYMBOLS = byte_symbols()


def as_bytes(piece: str | bytes) -> bytes:
    return piece.encode() if isinstance(piece, str) else piece


def build_tokenizer() -> Tokenizer:
    vocabulary = SYMBOLS + ["".join(SYMBOLS[byte] for byte in as_bytes(piece)) for piece in PIECES]
    tokenizer = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(vocabulary)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


TOKENIZER = build_tokenizer()
PIECE_IDS = {piece: 256 + i for i, piece in enumerate(PIECES)}


def detokenize(tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
    return TOKENIZER.decode(list(tokens), skip_special_tokens=False)


def spell(*pieces: str | bytes) -> list[int]:
    """Tokens of these pieces, byte by byte where a piece is no token."""
    tokens = []
    for piece in pieces:
        tokens += [PIECE_IDS[piece]] if piece in PIECE_IDS else list(as_bytes(piece))
    return tokens


def first_stop(
    words: Sequence[str], tokens: Sequence[int], decode: Callable[[list[int]], str] = detokenize
) -> tuple[int, str] | None:
    """Feed tokens one by one: how many it took, and the text before the word."""
    matcher = StopWordMatcher(words, decode)
    for count, token in enumerate(tokens, start=1):
        text = matcher.feed([token])
        if text is not None:
            return count, text
    return None


def brute_force(words: Sequence[str], tokens: Sequence[int]) -> tuple[int, str] | None:
    """Decode all, after each token."""
    for count in range(1, len(tokens) + 1):
        text = detokenize(tokens[:count]).rstrip(INCOMPLETE)
        hits = [text.find(word) for word in words if word in text]
        if hits:
            return count, text[: min(hits)]
    return None


class TestMatching:
    def test_the_found_word(self):
        """The longest word is found if several begin at the same place and are complete together."""
        for words, text, expected in (
            (["abc", "b"], "abc", "b"),
            (["EN", "END"], " END", "END"),
            (["END", "ND"], "so END", "END"),
            (["END"], "so", None),
        ):
            matcher = StopWordMatcher(words, detokenize)
            matcher.feed(spell(text))
            assert matcher.found == expected

    def test_a_match_may_reach_far_back(self):
        word = "a" * 30 + "b"
        tokens = spell("a" * 50 + "b")
        assert first_stop([word], tokens) == (51, "a" * 20)


class TestCharacters:
    def test_nothing_matches_inside_an_incomplete_character(self):
        """The sign that decoders write for half a character is no text yet."""
        assert first_stop([INCOMPLETE], spell("a", "€", "é", "\U0001f600")) is None

    @pytest.mark.parametrize("junk", [b"\xff", b"\xe2\x82", b"\xf0\x90\x80", b"\x80\xe2", b"\xef\xbf\xbd"])
    def test_endless_bytes_that_are_no_text(self, junk: bytes):
        tokens = spell("a", junk * 30, "END")
        assert first_stop(["END"], tokens) == brute_force(["END"], tokens)
        assert first_stop(["END"], tokens)[0] == len(tokens)

    @pytest.mark.parametrize("junk", range(10, 22))
    def test_a_character_where_patience_ends(self, junk: int):
        """Bytes that are no text are settled, but never the half of a character."""
        tokens = spell("a", b"\xff" * junk, HEAD, TAIL + HEAD, b"\xff\xff\xff", "END")
        assert first_stop(["END"], tokens) == brute_force(["END"], tokens)
        assert "€" in first_stop(["END"], tokens)[1]


class TestOtherTokenizers:
    def test_texts_with_a_separator_between_tokens(self):
        """A token's text depends on whether it is the first, as NullTokenizer writes it."""

        def decode(tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
            return " ".join(map(str, tokens))

        assert first_stop(["5 6"], [4, 5, 6, 7], decode) == (3, "4 ")

    def test_a_leading_space_that_the_decoder_takes_away(self):
        """The decoder of SentencePiece tokenizers removes a leading space at the start of a text."""
        pieces = ["▁a", "▁b", "c"]

        def decode(tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
            return "".join(pieces[token] for token in tokens).replace("▁", " ").removeprefix(" ")

        assert first_stop(["bc"], [0, 1, 2], decode) == (3, "a ")
        assert first_stop([" b"], [0, 1, 2], decode) == (2, "a")
        assert first_stop([" a"], [0, 1, 0], decode) == (3, "a b")

    def test_bytes_as_sentencepiece_tokenizers_write_them(self):
        """The decoder of SentencePiece drops a whole run of bytes while its last character is incomplete."""
        decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])

        def decode(tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
            return decoder.decode([f"<0x{token:02X}>" if token < 256 else "piece" for token in tokens])

        assert decode(spell("€é")[:4]) == 4 * INCOMPLETE
        assert first_stop(["é"], spell("€é"), decode) == (5, "€")
        assert first_stop(["piece"], [*spell("€"), 255, 256], decode)[0] == 5
        assert first_stop(["piece"], [*[255] * 40, 256], decode) == (41, 40 * INCOMPLETE)


# Hypothesis: pieces of text and words from few characters, so that matches and near misses are frequent.
LETTERS = "abcEND €é\U0001f600\n"
JUNK = [HEAD, TAIL + HEAD, b"\xff", b"\xe2\x82", b"\xf0\x9f", b"\x80", b"\xef\xbf\xbd", b"\xc3"]
TOKENS = st.lists(
    st.one_of(
        st.text(LETTERS, min_size=1, max_size=4).map(spell),
        st.sampled_from(PIECES).map(spell),
        st.sampled_from(JUNK).map(spell),
        st.integers(0, 255).map(lambda byte: [byte]),
    ),
    max_size=30,
).map(lambda parts: [token for part in parts for token in part])
WORDS = st.lists(st.text(LETTERS + INCOMPLETE, min_size=1, max_size=5), min_size=1, max_size=3)


@settings(max_examples=150, deadline=None)
@given(tokens=TOKENS, words=WORDS)
def test_equals_decoding_everything_after_each_token(tokens: list[int], words: list[str]):
    assert first_stop(words, tokens) == brute_force(words, tokens)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), words=WORDS)
def test_equals_brute_force_in_long_junk(data: st.DataObject, words: list[str]):
    """Runs of bytes longer than the matcher's patience, with text between them."""
    parts = data.draw(st.lists(st.tuples(st.sampled_from(JUNK), st.integers(1, 40), TOKENS), min_size=1, max_size=3))
    tokens = [token for junk, count, rest in parts for token in [*spell(junk * count), *rest]]
    assert first_stop(words, tokens) == brute_force(words, tokens)


class TestSpecialTokens:
    """Special tokens can be stop words, and are not part of the returned text."""

    VISIBLE = ("<|end|>", "<|user|>", "Yes", ", it", " is", ".")

    @settings(max_examples=60, deadline=None)
    @given(
        tokens=st.lists(st.integers(0, 5), max_size=20),
        words=st.lists(
            st.sampled_from(["s,", "Yes.", "it.", " is", "it is", "<|end|>", "d|>Y", "|><|", ">, it"]), max_size=3
        ),
    )
    def test_equals_decoding_everything_both_ways(self, tokens: list[int], words: list[str]):
        def decode(ids: Sequence[int], skip_special_tokens: bool = True) -> str:
            return "".join(self.VISIBLE[i] for i in ids if i > 1 or not skip_special_tokens)

        expected = None
        for count in range(1, len(tokens) + 1):
            seen = tokens[:count]
            visible, returned = decode(seen, skip_special_tokens=False), decode(seen)
            before = [returned[: returned.find(word)] for word in words if word in returned]
            for word in words:
                if word in visible:
                    start = visible.find(word)
                    whole = next(i for i in range(count) if len(decode(seen[: i + 1], False)) > start)
                    cut = start - len(decode(seen[:whole], False)) if seen[whole] > 1 else 0
                    before.append(decode(seen[:whole]) + self.VISIBLE[seen[whole]][:cut])
            if before:
                expected = count, min(before, key=len)
                break
        assert not words or first_stop(words, tokens, decode) == expected
