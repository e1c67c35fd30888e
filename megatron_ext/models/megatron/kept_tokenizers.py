"""Tokenizers of Megatron's kinds in a checkpoint: their files under names of ours, and additional settings.

`megatron_tokenizer.json` holds one object, `{"tokenizer_type": "TikTokenizer", ...}`, with the settings of that kind.
No Hugging Face tokenizer uses the names of these files, so that the kinds cannot be confused.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from megatron_ext.config.source import GPT2_TOKENIZER, SENTENCEPIECE_TOKENIZERS, TIKTOKEN_PATTERNS, TIKTOKEN_TOKENIZER
from megatron_ext.errors import ConfigError
from megatron_ext.files import read_json
from megatron_ext.text.library_tokenizers import Gpt2Tokenizer, SentencePieceTokenizer, TikTokenizer

LibraryTokenizer = TikTokenizer | SentencePieceTokenizer | Gpt2Tokenizer

KEPT_FILE = "megatron_tokenizer.json"
_KIND = "tokenizer_type"
_SENTENCEPIECE = SENTENCEPIECE_TOKENIZERS[0]
_FILES = {
    TIKTOKEN_TOKENIZER: ("tiktoken.json",),
    _SENTENCEPIECE: ("sentencepiece.model",),
    GPT2_TOKENIZER: ("gpt2_vocab.json", "gpt2_merges.txt"),
}
KEPT_FILES = (KEPT_FILE, *(name for names in _FILES.values() for name in names))
_PATTERN, _SPECIAL, _SIZE = "tiktoken_pattern", "tiktoken_num_special_tokens", "vocab_size"
_LARGEST = 2**24  # maximum of a number


def has_kept_tokenizer(directory: Path) -> bool:
    """Return whether a checkpoint has such a tokenizer."""
    return (directory / KEPT_FILE).is_file()


def keep_tokenizer(tokenizer: LibraryTokenizer, directory: Path) -> None:
    """Write the files for `read_kept_tokenizer`; raise `OSError` if a file is missing or cannot be written."""
    kind, settings = _described(tokenizer)
    for name, file in zip(_FILES[kind], tokenizer.files, strict=True):
        shutil.copyfile(file, directory / name)
    text = json.dumps({_KIND: kind, **settings}, indent=2)
    (directory / KEPT_FILE).write_text(text + "\n", encoding="utf-8")


def read_kept_tokenizer(directory: Path) -> LibraryTokenizer:
    """Return the tokenizer of a checkpoint.

    Raises:
        ConfigError: A file is missing, damaged, or has invalid settings; the package that reads it is missing.
    """
    raw = read_json(directory / KEPT_FILE)
    kind = raw.get(_KIND)
    if not isinstance(kind, str) or kind not in _FILES:
        raise ConfigError(f"{directory / KEPT_FILE} has {_KIND} = {kind!r}, which must be one of {', '.join(_FILES)}")
    known = {_KIND, *((_PATTERN, _SPECIAL, _SIZE) if kind == TIKTOKEN_TOKENIZER else ())}
    if set(raw) != known:
        raise ConfigError(f"{directory / KEPT_FILE} has fields {', '.join(raw)}; a {kind} has {', '.join(known)}")
    files = [directory / name for name in _FILES[kind]]
    for file in files:
        if not file.is_file():
            raise ConfigError(f"{directory} has no {file.name}, which {KEPT_FILE} describes")
    if kind == GPT2_TOKENIZER:
        return Gpt2Tokenizer(*files)
    if kind == _SENTENCEPIECE:
        return SentencePieceTokenizer(*files)
    return TikTokenizer(files[0], *_tiktoken_settings(raw, directory))


def _tiktoken_settings(raw: Mapping[str, object], directory: Path) -> tuple[str, int, int]:
    pattern, special, size = raw[_PATTERN], raw[_SPECIAL], raw[_SIZE]
    if pattern not in TIKTOKEN_PATTERNS or not _is_count(special) or not _is_count(size):
        raise ConfigError(
            f"{directory / KEPT_FILE} has a {_PATTERN}, {_SPECIAL} or {_SIZE} that is not valid: "
            f"{pattern!r}, {special!r}, {size!r}"
        )
    return str(pattern), int(str(special)), int(str(size))


def _is_count(value: object) -> bool:
    return type(value) is int and 0 < value <= _LARGEST


def _described(tokenizer: LibraryTokenizer) -> tuple[str, dict[str, object]]:
    """Return the tokenizer's kind, and the settings that its files do not contain."""
    if isinstance(tokenizer, Gpt2Tokenizer):
        return GPT2_TOKENIZER, {}
    if isinstance(tokenizer, SentencePieceTokenizer):
        return _SENTENCEPIECE, {}
    settings = {_PATTERN: tokenizer.pattern, _SPECIAL: tokenizer.special_tokens, _SIZE: tokenizer.vocab_size}
    return TIKTOKEN_TOKENIZER, settings
