"""Text to token ids and back."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megatron_ext.errors import ConfigError
from megatron_ext.files import open_regular, read_json, read_text
from megatron_ext.text.chat_template import TEMPLATE_FILE, read_chat_template, read_special_tokens, render_chat
from megatron_ext.text.chat_tokens import ChatTokens, RenderedChat, marked_special

TOKENIZER_FILE = "tokenizer.json"
# What a directory may hold of a tokenizer: saved with a checkpoint, and enough to rebuild it.
TOKENIZER_FILES = (
    TOKENIZER_FILE,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    TEMPLATE_FILE,
)
# A directory with one of these has a tokenizer; the others only describe one.
_VOCABULARIES = (TOKENIZER_FILE, "tokenizer.model", "vocab.json", "vocab.txt")
_DECODED = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "config.json",
    "generation_config.json",
)
# Read for end and beginning of a document, in this order; the last two hold ids, the others texts.
_TEXT_SOURCES = (("tokenizer_config.json", "{}_token"), ("special_tokens_map.json", "{}_token"))
_ID_SOURCES = (("generation_config.json", "{}_token_id"), ("config.json", "{}_token_id"))
# A bare tokenizer.json does not say which of its special tokens ends a document: these names do, everywhere we know.
_USUAL_ENDS = ("<|endoftext|>", "</s>", "<eos>", "<eod>")
_LONGEST_FILE = 256 * 1024**2  # bytes; vocabularies of 250,000 entries are 35 MB
NULL_TOKENIZER = "NullTokenizer"
HUGGING_FACE_TOKENIZER = "HuggingFaceTokenizer"


class Tokenizer(Protocol):
    """What engine, controller and tools use; megatron-core's names."""

    eod: int | None  # ends a document, None if the tokenizer has no such token
    bos: int | None  # begins one
    vocab_size: int  # ids are below it

    @property
    def token_ids(self) -> range | frozenset[int]:
        """Those that are tokens; a file may leave gaps."""

    def tokenize(self, text: str) -> list[int]:
        """Ids of a text, with the special tokens that the tokenizer itself adds."""

    def detokenize(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Text of ids."""


@dataclass(frozen=True)
class SpecialIds:
    """Ids of the tokens around a document; None where there is none."""

    eod: int | None = None
    bos: int | None = None


class NullTokenizer:
    """Texts are ids separated by spaces. There is no end of document.

    Args:
        vocab_size: Ids are below it.
    """

    eod: int | None = None
    bos: int | None = None

    def __init__(self, vocab_size: int) -> None:
        if vocab_size <= 0:
            raise ConfigError(f"vocabulary size {vocab_size} must be positive")
        self.vocab_size, self.token_ids = vocab_size, range(vocab_size)

    def tokenize(self, text: str) -> list[int]:
        """Ids of a text such as "17 4 4".

        Raises:
            ConfigError: A word is not an id of the vocabulary.
        """
        for word in text.split():
            if not (word.isascii() and word.isdigit() and int(word) < self.vocab_size):
                raise ConfigError(
                    f"{word!r} is no token id; the NullTokenizer takes ids from 0 to {self.vocab_size - 1} "
                    "separated by spaces"
                )
        return [int(word) for word in text.split()]

    def detokenize(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Ids as text; none is special."""
        return " ".join(str(token_id) for token_id in ids)


class TextTokenizer:
    """A Hugging Face tokenizer: `tokenizer.json` through `tokenizers`, anything else through `transformers`.

    Args:
        path: A directory, or a `tokenizer.json`, whose neighbours are read for the special tokens.

    Raises:
        ConfigError: Nothing there, or no tokenizer in it.
    """

    _chat_tokens: ChatTokens | None = None  # when the first conversation comes

    def __init__(self, path: str | Path) -> None:
        self.path = path = Path(path)
        if not path.exists():
            raise ConfigError(f"tokenizer {path} does not exist; give a directory or a {TOKENIZER_FILE}")
        self._directory = directory = path if path.is_dir() else path.parent
        self._marked_special = marked_special(directory)
        file = path / TOKENIZER_FILE if path.is_dir() else path
        self._backend = _FastTokenizer(file) if os.path.lexists(file) else _AutoTokenizer(path)
        self.vocab_size, self.token_ids = self._backend.vocab_size, self._backend.token_ids
        special = special_ids(directory, self._backend.id_of)
        for label, token_id in (("end", special.eod), ("beginning", special.bos)):
            if token_id is not None and not 0 <= token_id < self.vocab_size:
                raise ConfigError(
                    f"{directory}: the {label} of a document is token {token_id}, "
                    f"outside the tokenizer's {self.vocab_size} ids"
                )
        self.eod, self.bos = special.eod, special.bos
        # Read now: what is in the directory later is another tokenizer's.
        self._special_tokens = read_special_tokens(directory)
        self._chat_template = _chat_template_or_error(directory)

    def tokenize(self, text: str) -> list[int]:
        """Ids of a text, with the special tokens that the tokenizer itself adds."""
        return self._backend.encode(text)

    def detokenize(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Text of ids, without special tokens unless they are asked for."""
        return self._backend.decode(ids, skip_special_tokens)

    @property
    def longest_token(self) -> int:
        """Characters that one token stands for at most, so that n characters are at least n / `longest_token` tokens.

        Characters that the tokenizer drops, such as spaces that repeat, are not counted.
        """
        return self._backend.longest_token

    @property
    def chat_template(self) -> str | None:
        """The Jinja template that comes with the tokenizer; None if it is none of a chat model.

        Raises:
            ConfigError: See `read_chat_template`.
        """
        if isinstance(self._chat_template, ConfigError):
            raise self._chat_template
        return self._chat_template

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """A conversation as a prompt.

        Most templates write the beginning of a document, which `tokenize` may then put before it once more. The engine
        sees to it that a prompt begins with one (`InferenceController.tokenize_prompt`).

        Args:
            messages: As in [{"role": "user", "content": "Hello"}].
            add_generation_prompt: End with what begins the model's answer.

        Raises:
            ConfigError: No template, messages that are none, or that the template refuses.
        """
        if self.chat_template is None:
            raise ConfigError(f"{self._directory} has no chat template; give the prompt as text")
        return render_chat(
            self.chat_template, messages, self._special_tokens, add_generation_prompt=add_generation_prompt
        )

    def tokenize_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, *, parse_control: bool = False
    ) -> list[int]:
        """Ids of a conversation, with the special tokens that the tokenizer itself adds; the rest as `render_chat`."""
        return self.render_chat(messages, add_generation_prompt, parse_control=parse_control).ids()

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, *, parse_control: bool = False
    ) -> RenderedChat:
        """A conversation as a text that knows which special tokens in it are text.

        Args:
            messages: As for `apply_chat_template`.
            add_generation_prompt: The same.
            parse_control: Whether special tokens that contents spell are these tokens. Otherwise they are so in the
                assistant's contents only, and text in the others'; see `chat_tokens`.

        Raises:
            ConfigError: As `apply_chat_template`; a role that spells a special token.
        """

        def render(chat: Sequence[Mapping[str, Any]]) -> str:
            return self.apply_chat_template(chat, add_generation_prompt)

        if self._chat_tokens is None:
            special = {*self._marked_special, self.eod, self.bos}
            self._chat_tokens = ChatTokens(self._backend.wrapped, special)
        return self._chat_tokens.render(messages, render, self.tokenize, parse_control=parse_control)


def _chat_template_or_error(directory: Path) -> str | ConfigError | None:
    """The template, or what is wrong with it: whoever needs no chats need not hear of it."""
    try:
        return read_chat_template(directory)
    except ConfigError as error:
        return error


class _FastTokenizer:
    """`tokenizer.json` by itself."""

    def __init__(self, file: Path) -> None:
        import tokenizers

        text = read_text(file, _LONGEST_FILE)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # `tokenizers` raises bare Exception
            raise ConfigError(f"{file} is no tokenizer: {error}") from error
        # Saved truncation and padding belong to training batches: a prompt is neither cut nor filled up.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size, self.token_ids = _extent(vocabulary.values())
        self.longest_token = max(map(len, vocabulary), default=0)

    def encode(self, text: str) -> list[int]:
        # `encode` keeps Python's lock, so that 8 MB of text stopped all threads for 7 to 20 s.
        (encoding,) = self._tokenizer.encode_batch_fast([text])
        return encoding.ids

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def id_of(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    @property
    def wrapped(self) -> Any:
        return self._tokenizer


class _AutoTokenizer:
    """A directory of an older format."""

    def __init__(self, directory: Path) -> None:
        if not has_tokenizer(directory):
            wanted = ", ".join(_VOCABULARIES)
            raise ConfigError(f"{directory} has no tokenizer: none of {wanted}")
        brings_code = _check_files(directory)
        from transformers import AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # of files that others wrote transformers may raise anything
            reason = "it is code of its own (auto_map), which is never run" if brings_code else _first_line(error)
            raise ConfigError(f"{directory}: the tokenizer cannot be read: {reason}") from error
        vocabulary = self._tokenizer.get_vocab()
        self.vocab_size, self.token_ids = _extent(vocabulary.values())
        self.longest_token = max(map(len, vocabulary), default=0)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)

    def id_of(self, token: str) -> int | None:
        return self._tokenizer.get_vocab().get(token)

    @property
    def wrapped(self) -> Any:
        return self._tokenizer


def _extent(ids: Iterable[int]) -> tuple[int, range | frozenset[int]]:
    """What all ids are below, and the ids."""
    known = frozenset(ids)
    size = 1 + max(known, default=-1)
    return size, range(size) if len(known) == size else known


def has_tokenizer(directory: Path) -> bool:
    """Whether a directory holds a vocabulary that `TextTokenizer` can read."""
    return any((directory / name).is_file() for name in _VOCABULARIES)


def _check_files(directory: Path) -> bool:
    """What transformers may open is regular and not too long, and what it decodes is not nested deep.

    Returns:
        Whether the tokenizer comes with code. transformers may have a class for it nevertheless.

    Raises:
        ConfigError: It names the file.
    """
    for entry in sorted(directory.iterdir()):
        if not entry.is_dir():
            with open_regular(entry) as file:
                size = os.fstat(file.fileno()).st_size
            if entry.name in TOKENIZER_FILES and size > _LONGEST_FILE:
                raise ConfigError(f"{entry}: {size} bytes; a tokenizer's file may have {_LONGEST_FILE}")
    decoded = [read_json(directory / name) for name in _DECODED if os.path.lexists(directory / name)]
    return any(fields.get("auto_map") for fields in decoded)


def special_ids(directory: Path, id_of: Any) -> SpecialIds:
    """End and beginning of a document, from the tokenizer's files, else from the model's.

    Where a file lists several ends, the first one counts. Without any word on the end, a special token with a usual
    name is it.

    Args:
        directory: Where the files are.
        id_of: Text of a token to its id, or None.

    Raises:
        ConfigError: A file names a token that the tokenizer does not have.
    """
    eod = _named_id(directory, "eos", id_of)
    if eod is None:
        eod = next((found for name in _USUAL_ENDS if (found := id_of(name)) is not None), None)
    return SpecialIds(eod, _named_id(directory, "bos", id_of))


def _named_id(directory: Path, role: str, id_of: Any) -> int | None:
    for file, key in _TEXT_SOURCES:
        token = _value(directory / file, key.format(role))
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str) and token:
            found = id_of(token)
            if found is None:
                raise ConfigError(f"{directory / file}: {key.format(role)} {token!r} is not in the vocabulary")
            return found
    for file, key in _ID_SOURCES:
        value = _value(directory / file, key.format(role))
        if isinstance(value, list) and value:
            value = value[0]
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def _value(file: Path, key: str) -> Any:
    return read_json(file).get(key) if os.path.lexists(file) else None


def copy_tokenizer_files(source: Path, target: Path) -> None:
    """Copy a tokenizer's files from a directory (what it has of them), or one file as `tokenizer.json`."""
    if source.is_file():
        shutil.copyfile(source, target / TOKENIZER_FILE)
        return
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]
