"""Tokenizer files: names, copies, checks before they are opened; chat templates and special tokens that they name."""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ext.errors import ConfigError
from megatron_ext.files import open_regular, read_json, read_text
from megatron_ext.text.template_rendering import RENDERER
from megatron_ext.text.template_worker import Rendering

if TYPE_CHECKING:
    from megatron_ext.text.tokenizer import TextTokenizer

TEMPLATE_FILE = "chat_template.jinja"
PROCESSOR_TEMPLATE = "chat_template.json"  # older file of models that also read images
_ADDITIONAL, _SUFFIX = "additional_chat_templates", ".jinja"
ADDITIONAL_TEMPLATES = f"{_ADDITIONAL}/*{_SUFFIX}"
_MAX_TEMPLATES = 64
_LONGEST_TEMPLATE = 1024**2  # bytes
TOKENIZER_CONFIG = "tokenizer_config.json"
_SPECIAL_TOKEN_FILES = (TOKENIZER_CONFIG, "special_tokens_map.json")
SPECIAL_TOKENS = tuple(f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_DEFAULT, _TOOL_USE = "default", "tool_use"  # names that transformers chooses

TOKENIZER_FILE = "tokenizer.json"
GENERATION_FILE = "generation_config.json"  # the model's, with the tokens that end a document
# Patterns of all files of a tokenizer: saved with a checkpoint, and sufficient to rebuild it.
TOKENIZER_FILES = (
    TOKENIZER_FILE,
    TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    TEMPLATE_FILE,
    PROCESSOR_TEMPLATE,
    ADDITIONAL_TEMPLATES,
    GENERATION_FILE,
)
# A directory with one of these has a tokenizer; other files only describe it.
VOCABULARIES = (TOKENIZER_FILE, "tokenizer.model", "vocab.json", "vocab.txt")
_DECODED = (
    TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "config.json",
    GENERATION_FILE,
)
LONGEST_FILE = 256 * 1024**2  # bytes; vocabularies of 250,000 entries are 35 MB


@dataclass(frozen=True)
class ChatTemplates:
    """Chat templates of a model by name.

    Attributes:
        named: Jinja templates; empty if the model is not a chat model.
        where: File or directory of the templates, for messages.
    """

    named: Mapping[str, str]
    where: Path

    @classmethod
    def only(cls, template: str, where: Path) -> ChatTemplates:
        """Return a single template, which serves all conversations."""
        return cls({_DEFAULT: template}, where)

    def chosen(self, *, has_tools: bool) -> str | None:
        """Return the template of a conversation, as transformers chooses it; None without any.

        Raises:
            ConfigError: There are several, and none is the default.
        """
        name = _TOOL_USE if has_tools and _TOOL_USE in self.named else _DEFAULT
        if self.named and name not in self.named:
            raise ConfigError(f"{self.where}: none of the chat templates {', '.join(self.named)} is named {name!r}")
        return self.named.get(name)


def read_chat_templates(directory: Path) -> ChatTemplates:
    """Return the templates of a directory: files of their own, else from `tokenizer_config.json`, as in transformers.

    `chat_template.json`, which transformers reads for processors, is read if there is no other template.

    Raises:
        ConfigError: A file is not a template, or there are too many.
    """
    files = {path.name.removesuffix(_SUFFIX): path for path in sorted(directory.glob(ADDITIONAL_TEMPLATES))}
    if os.path.lexists(directory / TEMPLATE_FILE):
        files = {_DEFAULT: directory / TEMPLATE_FILE} | files
    if len(files) > _MAX_TEMPLATES:
        raise ConfigError(f"{directory / _ADDITIONAL}: {len(files)} chat templates; at most {_MAX_TEMPLATES} are read")
    if files:
        return ChatTemplates({name: read_text(path, _LONGEST_TEMPLATE) for name, path in files.items()}, directory)
    for file in (directory / TOKENIZER_CONFIG, directory / PROCESSOR_TEMPLATE):
        template = read_json(file).get("chat_template") if os.path.lexists(file) else None
        if template is not None:
            return ChatTemplates(_named(template, file), file)
    return ChatTemplates({}, directory)


def _named(template: object, file: Path) -> dict[str, str]:
    """Return the templates of a JSON value by name: a text, a list of names with texts, or an object."""
    items = template if isinstance(template, list) else [{"name": _DEFAULT, "template": template}]
    if isinstance(template, dict):
        items = [{"name": name, "template": text} for name, text in template.items()]
    found = {one.get("name"): one.get("template") for one in items if isinstance(one, dict)}
    named = {name: text for name, text in found.items() if isinstance(name, str) and isinstance(text, str)}
    if not named or len(named) < len(items):
        raise ConfigError(f"{file}: chat_template is neither a text nor a list of names and texts")
    return named


def read_template_file(file: Path) -> ChatTemplates:
    """Return the template of a file that a user gives for all conversations, after a check.

    Raises:
        ConfigError: The file cannot be read, or is not a template.
    """
    try:
        template = read_text(file, _LONGEST_TEMPLATE)
    except ConfigError as error:
        raise ConfigError(f"--chat-template {error}") from None
    try:
        _compile(template)
    except ConfigError as error:
        raise ConfigError(f"--chat-template {file}: {error}") from None
    return ChatTemplates.only(template, file)


@functools.lru_cache(maxsize=1)  # the path is checked early, and read once more with the tokenizer
def _compile(template: str) -> None:
    """Compile a template in the process that will render it.

    Raises:
        ConfigError: It is not a template.
    """
    RENDERER.render(Rendering(template, None, {}))


def read_special_tokens(directory: Path) -> dict[str, str]:
    """Return the texts of special tokens that templates may use, as {"bos_token": "<s>", ...}."""
    tokens: dict[str, str] = {}
    for name in _SPECIAL_TOKEN_FILES:
        fields = read_json(directory / name) if os.path.lexists(directory / name) else {}
        for role in SPECIAL_TOKENS:
            token = fields.get(role)
            if isinstance(token, dict):
                token = token.get("content")
            if isinstance(token, str):
                tokens.setdefault(role, token)
    return tokens


def has_tokenizer(directory: Path) -> bool:
    """Return whether a directory holds a vocabulary that `TextTokenizer` can read."""
    return any((directory / name).is_file() for name in VOCABULARIES)


def no_tokenizer(directory: Path) -> str:
    """Return the problem of a directory that holds no vocabulary."""
    return f"{directory} has no tokenizer: none of {', '.join(VOCABULARIES)}"


def copy_tokenizer_files(source: Path, target: Path) -> None:
    """Copy a tokenizer's files, as far as they exist, from a directory, or one file as `tokenizer.json`."""
    if source.is_file():
        shutil.copyfile(source, target / TOKENIZER_FILE)
        return
    for name in TOKENIZER_FILES:
        for file in source.glob(name):
            if file.is_file():
                copy = target / file.relative_to(source)
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, copy)


def describe_tokenizer(directory: Path, tokenizer: TextTokenizer) -> None:
    """Write the special tokens of a bare `tokenizer.json` to a file that transformers reads.

    Args:
        directory: Directory of the tokenizer's files; unchanged if it has this file already.
        tokenizer: Tokenizer of these files.
    """
    file = directory / TOKENIZER_CONFIG
    if not (directory / TOKENIZER_FILE).is_file() or file.exists():
        return
    fields = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for role, token in (("eos_token", tokenizer.eod), ("bos_token", tokenizer.bos)):
        text = "" if token is None else tokenizer.detokenize([token], skip_special_tokens=False)
        if text and tokenizer.tokenize_plain(text) == [token]:
            fields[role] = text
    file.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def check_files(directory: Path) -> bool:
    """Check that files for transformers are regular and not too long, and that its JSON is not nested deeply.

    Returns:
        Whether the tokenizer comes with code. transformers may have a class for it nevertheless.

    Raises:
        ConfigError: A file fails a check; names the file.
    """
    for entry in sorted(directory.iterdir()):
        if not entry.is_dir():
            with open_regular(entry) as file:
                size = os.fstat(file.fileno()).st_size
            if entry.name in TOKENIZER_FILES and size > LONGEST_FILE:
                raise ConfigError(f"{entry}: {size} bytes; a tokenizer's file must have at most {LONGEST_FILE}")
    decoded = [read_json(directory / name) for name in _DECODED if os.path.lexists(directory / name)]
    return any(fields.get("auto_map") for fields in decoded)


IdOf = Callable[[str], int | None]  # id of a token's text

# Files with ids of the end and beginning of a document; files of the tokenizer, which have texts, come first.
_ID_FILES = (GENERATION_FILE, "config.json")
# A bare tokenizer.json does not say which special token ends a document: these names are the usual ones.
_USUAL_ENDS = ("<|endoftext|>", "</s>", "<eos>", "<eod>")


def special_ids(directory: Path, id_of: IdOf) -> tuple[int | None, tuple[int, ...]]:
    """Return the token that begins a document, and all that end one, from the tokenizer's files, else from the model's.

    If the model's files list several ends, all of them end a document; an end that the tokenizer names is the first. If
    no file names the end, a special token with a usual name is the end.

    Args:
        directory: Directory of the files.
        id_of: Text of a token to its id, or None.

    Raises:
        ConfigError: A file names a token that the tokenizer does not have.
    """
    eod = _named_id(directory, "eos", id_of)
    if eod is None:
        eod = next((found for name in _USUAL_ENDS if (found := id_of(name)) is not None), None)
    ends = () if eod is None else tuple(dict.fromkeys((eod, *_listed_ids(directory, "eos"))))
    return _named_id(directory, "bos", id_of), ends


def _named_id(directory: Path, role: str, id_of: IdOf) -> int | None:
    for file in _SPECIAL_TOKEN_FILES:
        token = _value(directory / file, f"{role}_token")
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str) and token:
            found = id_of(token)
            if found is None:
                raise ConfigError(f"{directory / file}: {role}_token {token!r} is not in the vocabulary")
            return found
    return next(iter(_listed_ids(directory, role)), None)


def _listed_ids(directory: Path, role: str) -> list[int]:
    """Return the ids of a role from the first of the model's files that names any."""
    for file in _ID_FILES:
        value = _value(directory / file, f"{role}_token_id")
        ids = [one for one in (value if isinstance(value, list) else [value]) if type(one) is int]
        if ids:
            return ids
    return []


def _value(file: Path, key: str) -> object:
    return read_json(file).get(key) if os.path.lexists(file) else None
