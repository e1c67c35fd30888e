"""Prompts from flags, from JSON lines, and the shipped ones. Every line is checked before the first one runs."""

from __future__ import annotations

import dataclasses
import json
import sys
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, BinaryIO

from megatron_ext.config import RequestParams, RunConfig
from megatron_ext.errors import ConfigError
from megatron_ext.models.tokenizer import Tokenizer
from megatron_ext.scheduling.vocabulary import Vocabulary

STANDARD_INPUT = "-"
_CONTENT_FIELDS = ("text", "token_ids")
_KINDS: dict[Any, tuple[type | tuple[type, ...], str]] = {
    int: (int, "a whole number"),
    float: ((int, float), "a number"),
    bool: (bool, "true or false"),
    str: (str, "a text"),
}


@dataclass(frozen=True)
class Prompt:
    """What to submit: text or token ids, the request's own settings, and where it was read."""

    content: str | tuple[int, ...]
    params: RequestParams
    source: str  # "prompts.jsonl, line 3"


def read_prompts(run: RunConfig, defaults: RequestParams, stdin: BinaryIO | None = None) -> list[Prompt]:
    """The prompts of a run: `--prompts`, else `--prompt-file`, else the shipped ones.

    Args:
        run: Says where the prompts are.
        defaults: Settings of a prompt that brings none of its own.
        stdin: What "-" reads; the process's standard input if None.

    Raises:
        ConfigError: If the file cannot be read or is empty, or a line is wrong; names the line.
    """
    if run.prompts:
        prompts = [Prompt(text, defaults, f"--prompts, prompt {i}") for i, text in enumerate(run.prompts, start=1)]
        for prompt in prompts:
            if not prompt.content:
                raise ConfigError(f"{prompt.source} is empty; give at least one character")
            if _is_broken(prompt.content):
                raise ConfigError(f"{prompt.source}: {_shown(prompt.content)} is not a text in UTF-8")
        return prompts
    if run.prompt_file is None:
        return example_prompts(defaults)
    if run.prompt_file == STANDARD_INPUT:
        return parse_lines(stdin or sys.stdin.buffer, "standard input", defaults)
    try:
        with open(run.prompt_file, "rb") as file:
            return parse_lines(file, run.prompt_file, defaults)
    except OSError as error:
        raise ConfigError(f"--prompt-file {run.prompt_file}: {error.strerror}") from None


def example_prompts(defaults: RequestParams) -> list[Prompt]:
    """The shipped prompts: one long system prompt with several questions, and conversations turn by turn."""
    with (files("megatron_ext.serving") / "example_prompts.jsonl").open("rb") as file:
        return parse_lines(file, "example_prompts.jsonl", defaults)


def parse_lines(lines: Iterable[bytes], name: str, defaults: RequestParams) -> list[Prompt]:
    """Parse JSON lines; blank ones are passed over.

    Raises:
        ConfigError: If there is no prompt, or for the first bad line: `name`, its number, and what is wrong.
    """
    prompts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        source = f"{name}, line {number}"
        try:
            prompts.append(_parse_line(line, defaults, source))
        except ValueError as error:  # ConfigError, JSONDecodeError and UnicodeDecodeError are ValueErrors
            raise ConfigError(f"{source}: {_reason(error)}") from None
    if not prompts:
        raise ConfigError(f'{name} has no prompt; give one JSON object a line, such as {{"text": "Hello"}}')
    return prompts


def check_tokens(prompts: Iterable[Prompt], tokenizer: Tokenizer, vocab_size: int) -> None:
    """See that a model with this tokenizer and vocabulary can read every prompt, before the first one runs.

    Raises:
        ConfigError: For the first prompt that has no token, or an id that is none; names where it was read.
    """
    vocabulary = Vocabulary(tokenizer, vocab_size)
    for prompt in prompts:
        try:
            is_text = isinstance(prompt.content, str)
            tokens = tokenizer.tokenize(prompt.content) if is_text else prompt.content
            vocabulary.check_prompt(tokens)
        except ConfigError as error:
            raise ConfigError(f"{prompt.source}: {error}") from None
        if not tokens:
            raise ConfigError(f"{prompt.source}: the tokenizer makes no token of {_shown(prompt.content)}")


def _parse_line(line: bytes, defaults: RequestParams, source: str) -> Prompt:
    fields = json.loads(line.decode("utf-8-sig"), object_pairs_hook=_unique_fields)
    if not isinstance(fields, dict):
        raise ConfigError('not a JSON object, such as {"text": "Hello"}')
    hints = typing.get_type_hints(RequestParams)
    unknown = sorted(set(fields) - set(_CONTENT_FIELDS) - set(hints))
    if unknown:
        raise ConfigError(f"unknown field {unknown[0]!r}; known are {', '.join((*_CONTENT_FIELDS, *hints))}")
    content = _content(fields)
    own = {name: _checked(name, value, hints[name]) for name, value in fields.items() if name in hints}
    params = dataclasses.replace(defaults, **own)
    if own.get("skip_prompt_log_probs") and not params.return_log_probs:
        raise ConfigError("skip_prompt_log_probs needs return_log_probs; set it or leave skip_prompt_log_probs out")
    return Prompt(content, params, source)


def _content(fields: dict[str, Any]) -> str | tuple[int, ...]:
    given = [name for name in _CONTENT_FIELDS if name in fields]
    if len(given) != 1:
        raise ConfigError(f"has {'both' if given else 'neither'} text {'and' if given else 'nor'} token_ids; give one")
    value = fields[given[0]]
    if given == ["text"]:
        if not isinstance(value, str) or not value:
            raise ConfigError(f"text {_shown(value)} is not a text of at least one character")
        if _is_broken(value):
            raise ConfigError(f"text {_shown(value)} has half of a surrogate pair, which is no character")
        return value
    if not isinstance(value, list) or not value or not all(_is(token, int) and token >= 0 for token in value):
        raise ConfigError(f"token_ids {_shown(value)} is not a list of at least one whole number, zero or more")
    return tuple(value)


def _is_broken(text: str) -> bool:
    """Whether it has halves of surrogate pairs: JSON can say them, and bytes of another encoding become them."""
    return any("\ud800" <= character <= "\udfff" for character in text)


def _checked(name: str, value: Any, hint: Any) -> Any:
    """`value` if it is of the field's type; lists become tuples."""
    if isinstance(hint, types.UnionType):
        if value is None:
            return None
        (hint,) = (part for part in typing.get_args(hint) if part is not types.NoneType)
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ConfigError(f"{name} {_shown(value)} is not a list of texts")
        return tuple(value)
    allowed, description = _KINDS[hint]
    if not _is(value, allowed):
        raise ConfigError(f"{name} {_shown(value)} is not {description}")
    return value


def _is(value: Any, allowed: type | tuple[type, ...]) -> bool:
    """`isinstance`, but true and false are no numbers."""
    return isinstance(value, allowed) and (allowed is bool or not isinstance(value, bool))


def _unique_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"field {twice!r} is given twice")
    return fields


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _reason(error: ValueError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON: {error.msg} (column {error.colno})"
    if isinstance(error, UnicodeDecodeError):
        return "not a text in UTF-8"
    return str(error)
