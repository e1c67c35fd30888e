"""Tokenizers from files of every kind, and which token ends a document."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from megatron_ext.errors import ConfigError
from megatron_ext.text.tokenizer import NullTokenizer, TextTokenizer
from megatron_ext.text.tokenizer_files import has_tokenizer

TEXT = "the quick brown fox, naïve as ever, jumps over the lazy dog"


def byte_level(*special: str) -> Tokenizer:
    """A BPE tokenizer of bytes, trained on one sentence."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=list(special), initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A tokenizer.json with three special tokens, none of a usual name."""
    byte_level("<a>", "<b>", "<c>").save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write(path: Path, **fields: object) -> None:
    path.write_text(json.dumps(fields))


def test_text_and_back(directory: Path) -> None:
    tokenizer = TextTokenizer(directory)
    ids = tokenizer.tokenize(TEXT)
    assert len(ids) < len(TEXT.encode())
    assert all(0 <= token_id < tokenizer.vocab_size for token_id in ids)
    assert tokenizer.detokenize(ids) == TEXT
    assert tokenizer.detokenize([*ids, 1]) == TEXT
    assert tokenizer.detokenize([*ids, 1], skip_special_tokens=False) == TEXT + "<b>"
    assert TextTokenizer(directory / "tokenizer.json").tokenize(TEXT) == ids


def test_saved_truncation_and_padding_do_not_touch_prompts(directory: Path) -> None:
    whole = TextTokenizer(directory).tokenize(TEXT)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=100)
    tokenizer.save(str(directory / "tokenizer.json"))
    assert TextTokenizer(directory).tokenize(TEXT) == whole


def test_end_of_document_by_file(directory: Path) -> None:
    """The tokenizer's own files before the model's."""
    assert (TextTokenizer(directory).eod, TextTokenizer(directory).bos) == (None, None)
    write(directory / "config.json", eos_token_id=0, bos_token_id=2)
    assert (TextTokenizer(directory).eod, TextTokenizer(directory).bos) == (0, 2)
    write(directory / "generation_config.json", eos_token_id=[2, 0])
    assert (TextTokenizer(directory).eod, TextTokenizer(directory).bos) == (2, 2)
    assert TextTokenizer(directory).ends == (2, 0)
    write(directory / "special_tokens_map.json", eos_token={"content": "<b>"})
    assert (TextTokenizer(directory).eod, TextTokenizer(directory).ends) == (1, (1, 2, 0))
    write(directory / "tokenizer_config.json", eos_token="<c>", bos_token="<a>")
    assert (TextTokenizer(directory).eod, TextTokenizer(directory).bos) == (2, 0)
    write(directory / "tokenizer_config.json", eos_token=None)
    assert TextTokenizer(directory).eod == 1


def test_end_of_document_that_is_not_there(directory: Path) -> None:
    write(directory / "tokenizer_config.json", eos_token="</s>")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: eos_token '</s>' is not in the vocabulary"):
        TextTokenizer(directory)
    write(directory / "tokenizer_config.json", eos_token="<b>")
    write(directory / "config.json", bos_token_id=5000)
    with pytest.raises(ConfigError, match="the beginning of a document is token 5000, outside the tokenizer's"):
        TextTokenizer(directory)


def test_older_files_through_transformers(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """vocab.json and merges.txt: the same ids as tokenizer.json gives."""
    fast, older = TextTokenizer(directory), tmp_path_factory.mktemp("older")
    Tokenizer.from_file(str(directory / "tokenizer.json")).model.save(str(older))
    write(
        older / "tokenizer_config.json",
        tokenizer_class="GPT2Tokenizer",
        eos_token="<b>",
        bos_token="<a>",
        unk_token="<a>",
    )
    slow = TextTokenizer(older)
    assert slow.tokenize(TEXT) == fast.tokenize(TEXT)
    assert slow.detokenize([*slow.tokenize(TEXT), 1]) == TEXT
    assert (slow.eod, slow.bos) == (1, 0)


def test_no_tokenizer(tmp_path: Path) -> None:
    assert not has_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match="has no tokenizer: none of"):
        TextTokenizer(tmp_path)
    with pytest.raises(ConfigError, match="does not exist"):
        TextTokenizer(tmp_path / "nowhere")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="is not a tokenizer"):
        TextTokenizer(tmp_path)


def test_ids_as_text() -> None:
    tokenizer = NullTokenizer(20)
    assert tokenizer.tokenize(" 3 19  0 ") == [3, 19, 0]
    assert tokenizer.detokenize([3, 19, 0]) == "3 19 0"
    assert (tokenizer.eod, tokenizer.bos, tokenizer.vocab_size) == (None, None, 20)


@pytest.mark.parametrize("word", ["20", "-1", "three", "1.0", "²"])
def test_words_that_are_no_ids(word: str) -> None:
    with pytest.raises(ConfigError, match=f"'{word}' is not a token id; the NullTokenizer accepts ids from 0 to 19"):
        NullTokenizer(20).tokenize(f"1 {word}")


def test_ids_that_are_tokens(tmp_path):
    """SE-2: gaps of a file are known, and cost nothing where ids are far apart."""
    assert NullTokenizer(7).token_ids == range(7)
    content = {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "c": 4_000_000_000}, "unk_token": "a"},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = TextTokenizer(tmp_path)
    assert tokenizer.token_ids == {0, 1, 4_000_000_000}
    content["model"]["vocab"] = {"a": 0, "b": 1, "c": 2}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert TextTokenizer(tmp_path).token_ids == range(3)
