"""PY-16: a model's folder without a flag, told apart by its files, and what to do with what cannot be loaded."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from arguments import parse_arguments, parse_server_arguments


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    return tmp_path / "model"


@pytest.mark.parametrize("parse", [parse_arguments, parse_server_arguments])
@pytest.mark.parametrize(
    ("file", "is_megatrons"),
    [
        ("config.json", False),
        (".metadata", True),
        ("latest_checkpointed_iteration.txt", True),
        ("iter_0000100/common.pt", True),
    ],
)
def test_the_form_is_that_of_the_files(parse, file, is_megatrons, folder):
    (folder / file).parent.mkdir(exist_ok=True)
    (folder / file).touch()
    source = parse(["--seed", "3", str(folder), "--dtype", "float16"]).source
    expected = (str(folder), None) if is_megatrons else (None, str(folder))
    assert (source.load, source.load_hf, source.seed, source.dtype) == (*expected, 3, "float16")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("nowhere", "DIR nowhere does not exist; give the directory of a checkpoint"),
        ("org/name", "fetch it first, and give its folder: hf download org/name --local-dir name"),
        ("model/name", "DIR model/name does not exist; give the directory"),  # a folder of this name is there
        ("model/a.gguf", "DIR model/a.gguf: GGUF is not supported; convert it"),
        ("model", "DIR model: GGUF is not supported; convert it"),
        ("text", "DIR text is not a directory; give the directory of a checkpoint"),
        ("here --load-hf there", "here and --load-hf there are two models; give one of them"),
        ("here there", "unrecognized arguments: here there"),
    ],
)
def test_what_cannot_be_loaded(words, expected, folder, one_line_error, monkeypatch):
    monkeypatch.chdir(folder.parent)
    (folder / "a.gguf").touch()
    Path("text").touch()
    os.mkdir("here")
    assert expected in one_line_error(*words.split())


@pytest.mark.parametrize(
    ("text", "tokens"), [("32k", 32_000), ("32K", 32_768), ("0.5K", 512), ("1m", 10**6), ("1M", 2**20), ("4096", 4096)]
)
def test_sizes_have_units(text, tokens, tmp_path):
    """Sizes in flags and in files of flags, as in vLLM."""
    assert parse_arguments(["--max-model-len", text]).batching.max_sequence_length == tokens
    (tmp_path / "flags.yaml").write_text(f"inference-dynamic-batching-max-tokens: {text}\n")
    assert parse_arguments(["--model-config", str(tmp_path / "flags.yaml")]).batching.max_tokens == tokens


@pytest.mark.parametrize("text", ["0.3k5", "k", "1.0001k", "32kk", "-1k"])
def test_sizes_are_whole(text, one_line_error):
    assert "is not a whole number" in one_line_error("--max-model-len=" + text)
