"""SE-9: a tokenizer whose regular expressions give up is an error of the checkpoint, in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from tokenizers import Regex, decoders, normalizers, pre_tokenizers

from megatron_ext.errors import CheckpointError
from megatron_ext.text.rust_panics import panics_as_errors
from megatron_ext.text.tokenizer import TextTokenizer
from tests.unit_tests.support import hf_tokenizers

EXPONENTIAL = Regex("(a+)+$")
TEXT = "a" * 40 + "b"


def changed(directory: Path, change: Callable[[tokenizers.Tokenizer], None]) -> TextTokenizer:
    """A tokenizer of the Llama 3 kind, changed and saved, as a checkpoint has it."""
    hf_tokenizers.llama_3(directory)
    file = directory / "tokenizer.json"
    tokenizer = tokenizers.Tokenizer.from_file(str(file))
    change(tokenizer)
    tokenizer.save(str(file))
    (directory / "chat_template.jinja").write_text("{{ messages[0].content }}")
    return TextTokenizer(directory)


def splits(tokenizer: tokenizers.Tokenizer) -> None:
    split = pre_tokenizers.Split(EXPONENTIAL, "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, tokenizer.pre_tokenizer])


def normalizes(tokenizer: tokenizers.Tokenizer) -> None:
    tokenizer.normalizer = normalizers.Replace(EXPONENTIAL, "x")


def decodes(tokenizer: tokenizers.Tokenizer) -> None:
    tokenizer.decoder = decoders.Sequence([tokenizer.decoder, decoders.Fuse(), decoders.Replace(EXPONENTIAL, "x")])


def check(error: pytest.ExceptionInfo[CheckpointError], what: str) -> None:
    (line,) = str(error.value).splitlines()
    assert line.startswith(what)
    assert "retry-limit" in line, "the library's reason"
    assert "another tokenizer" in line


@pytest.mark.parametrize("change", [splits, normalizes])
def test_texts(tmp_path, change):
    tokenizer = changed(tmp_path / "t", change)
    question = [{"role": "user", "content": TEXT}]
    spelled = [{"role": "user", "content": f"<|eot_id|>{TEXT}"}]  # made tokens of by a copy
    for call in (
        lambda: tokenizer.tokenize(TEXT),
        lambda: tokenizer.tokenize_plain(TEXT),
        lambda: tokenizer.render_chat(question).ids(),
        lambda: tokenizer.render_chat(spelled).ids(),
    ):
        with pytest.raises(CheckpointError) as error:
            call()
        check(error, "the tokenizer failed to encode this text")
    assert tokenizer.detokenize(tokenizer.tokenize("Hello")) == "Hello", "it can be used for others"


def test_tokens(tmp_path):
    tokenizer = changed(tmp_path / "t", decodes)
    ids = tokenizer.tokenize(TEXT)
    with pytest.raises(CheckpointError) as error:
        tokenizer.detokenize(ids)
    check(error, "the tokenizer failed to decode these tokens")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), ValueError("x")], ids=repr)
def test_every_other_exception_passes(error):
    with pytest.raises(type(error)) as caught, panics_as_errors("the tokenizer"):
        raise error
    assert caught.value is error
