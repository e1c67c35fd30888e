"""Files of chat templates and of the special tokens that they may write, and the choice among several templates."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_ext.errors import ConfigError
from megatron_ext.files import read_json, read_text
from megatron_ext.text.template_rendering import RENDERER
from megatron_ext.text.template_worker import Rendering

TEMPLATE_FILE = "chat_template.jinja"
PROCESSOR_TEMPLATE = "chat_template.json"  # older file of models that also read images
_ADDITIONAL, _SUFFIX = "additional_chat_templates", ".jinja"
ADDITIONAL_TEMPLATES = f"{_ADDITIONAL}/*{_SUFFIX}"
_MAX_TEMPLATES = 64
_LONGEST_TEMPLATE = 1024**2  # bytes
_TOKENIZER_CONFIG = "tokenizer_config.json"
_SPECIAL_TOKEN_FILES = (_TOKENIZER_CONFIG, "special_tokens_map.json")
SPECIAL_TOKENS = tuple(f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_DEFAULT, _TOOL_USE = "default", "tool_use"  # names that transformers chooses


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
    for file in (directory / _TOKENIZER_CONFIG, directory / PROCESSOR_TEMPLATE):
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
