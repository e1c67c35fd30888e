"""MF-4: Megatron-LM's own kinds of tokenizers, on small vocabularies that are made here."""

from __future__ import annotations

import importlib.util
import json
import os

import pytest
import sentencepiece
import tokenizers
from megatron.core.tokenizers.text.libraries import TikTokenTokenizer

from megatron_ext.errors import ConfigError
from megatron_ext.text.library_tokenizers import Gpt2Tokenizer, SentencePieceTokenizer, TikTokenizer
from tests.unit_tests.support.vocabularies import MERGES, write_gpt2, write_sentencepiece, write_tiktoken

TEXTS = ("The thing in the other\nthree 2008!", "  é日本 \U0001f600 \t x", "The lazy dog yields", "</s> is spelled")
SPECIALS = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("vocabularies")


@pytest.fixture(scope="module")
def tiktoken_file(folder):
    return write_tiktoken(folder / "small.vocab.json")


@pytest.fixture(scope="module")
def tiktoken(tiktoken_file):
    return TikTokenizer(tiktoken_file, special_tokens=SPECIALS)


@pytest.fixture(scope="module")
def sentence_file(folder):
    return write_sentencepiece(folder / "llama.model")


@pytest.fixture(scope="module")
def sentence(sentence_file):
    return SentencePieceTokenizer(sentence_file)


@pytest.fixture(scope="module")
def gpt2_files(folder):
    return write_gpt2(folder)


@pytest.fixture(scope="module")
def gpt2(gpt2_files):
    return Gpt2Tokenizer(*gpt2_files)


class TestTikTokenizer:
    def test_ids_are_ranks_after_the_special_tokens(self, tiktoken):
        """`</s>`, token 2, ends a document; `<s>` begins one."""
        assert (tiktoken.bos, tiktoken.eod) == (1, 2)
        assert tiktoken.vocab_size == SPECIALS + 256 + len(MERGES)
        assert tiktoken.tokenize("a") == [SPECIALS + ord("a")]
        assert tiktoken.tokenize("the") == [SPECIALS + 256 + MERGES.index("the")]

    @pytest.mark.parametrize("text", TEXTS)
    def test_upstream_reads_the_same(self, tiktoken, tiktoken_file, text):
        theirs = TikTokenTokenizer(
            str(tiktoken_file), num_special_tokens=SPECIALS, pattern="v2", vocab_size=tiktoken.vocab_size
        )
        assert tiktoken.tokenize(text) == theirs.text_to_ids(text)

    def test_special_tokens_are_spelled_and_shown(self, tiktoken):
        """A text that spells a special token means it, as in Megatron."""
        ids = tiktoken.tokenize("a</s>b")
        assert ids == [SPECIALS + ord("a"), 2, SPECIALS + ord("b")]
        assert tiktoken.detokenize(ids) == "ab"
        assert tiktoken.detokenize(ids, skip_special_tokens=False) == "a</s>b"

    def test_patterns_differ(self, tiktoken_file):
        """The v2 pattern cuts before a capital letter after small ones."""
        one, other = (TikTokenizer(tiktoken_file, pattern, SPECIALS) for pattern in ("v1", "v2"))
        assert one.tokenize("rT") == [SPECIALS + 256 + MERGES.index("rT")]
        assert other.tokenize("rT") == [SPECIALS + ord("r"), SPECIALS + ord("T")]

    @pytest.mark.parametrize(
        ("content", "expected"),
        [
            ("{}", "not a list of tokens"),
            ("[" * 100_000, "not JSON"),
            ('["a"]', "leave 1 of"),
            (
                json.dumps([{"rank": i, "token_bytes": "YQ==", "token_str": "a"} for i in range(256)]),
                "is not a vocabulary",
            ),
            (json.dumps([{"rank": i} for i in range(300)]), "is not a vocabulary"),
        ],
        ids=lambda value: value[:20],
    )
    def test_files_that_are_none(self, tmp_path, content, expected):
        path = tmp_path / "x.vocab.json"
        path.write_text(content)
        with pytest.raises(ConfigError, match=expected) as caught:
            TikTokenizer(path, special_tokens=SPECIALS)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 500


class TestSentencePiece:
    def test_ids_are_the_library_s(self, sentence, sentence_file):
        """Ids have no beginning of a document, as Megatron reads texts."""
        theirs = sentencepiece.SentencePieceProcessor(model_file=str(sentence_file))
        assert (sentence.bos, sentence.eod, sentence.vocab_size) == (1, 2, theirs.get_piece_size())
        for text in TEXTS:
            assert sentence.tokenize(text) == theirs.encode(text)

    def test_a_file_that_is_none(self, tmp_path):
        path = tmp_path / "x.model"
        path.write_bytes(b"nothing")
        with pytest.raises(ConfigError, match=r"x\.model is not a SentencePiece model"):
            SentencePieceTokenizer(path)


class TestGpt2:
    def test_ids_are_the_library_s(self, gpt2, gpt2_files):
        theirs = tokenizers.ByteLevelBPETokenizer(*map(str, gpt2_files))
        for text in TEXTS:
            assert gpt2.tokenize(text) == theirs.encode(text).ids
            assert gpt2.detokenize(gpt2.tokenize(text)) == text

    def test_end_of_text(self, gpt2):
        assert gpt2.eod == gpt2.vocab_size - 1
        assert gpt2.bos is None
        assert gpt2.tokenize("a<|endoftext|>")[-1] == gpt2.eod
        assert gpt2.detokenize([gpt2.eod]) == ""
        assert gpt2.detokenize([gpt2.eod], skip_special_tokens=False) == "<|endoftext|>"


@pytest.mark.parametrize(
    ("package", "kind"), [("tiktoken", TikTokenizer), ("sentencepiece", SentencePieceTokenizer)], ids=str
)
def test_a_package_that_is_missing_is_one_line(package, kind, tmp_path, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else found(name))
    with pytest.raises(ConfigError, match=f"needs the package {package}, which is not installed; install the extra"):
        kind(tmp_path / "x.json")


@pytest.mark.parametrize(("kind", "name"), [(TikTokenizer, "x.json"), (SentencePieceTokenizer, "x.model")])
def test_special_files_do_not_block(kind, name, tmp_path):
    """SE-1: a pipe without a writer does not block."""
    os.mkfifo(tmp_path / name)
    with pytest.raises(ConfigError, match="a named pipe; only a regular file is read"):
        kind(tmp_path / name)
