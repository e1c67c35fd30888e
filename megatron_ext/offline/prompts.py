"""Prompts from flags, JSON lines and the package, or random ones. Every line is checked before the first one runs."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import random
import stat
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from megatron_ext.config import RequestParams, RunConfig
from megatron_ext.config.annotations import FieldType, FieldValues, MismatchError, field_types
from megatron_ext.config.run import DEFAULT_PROMPT_TOKENS
from megatron_ext.errors import ConfigError
from megatron_ext.scheduling.request_inputs import RequestInputs
from megatron_ext.text.grammars import Grammars
from megatron_ext.text.tokenizer import Tokenizer, tokenize_prompt
from megatron_ext.text.vocabulary import Vocabulary

logger = logging.getLogger(__name__)
STANDARD_INPUT = "-"
_CONTENT_FIELDS = ("text", "token_ids")
_IGNORED_SHOWN, _NAME_SHOWN = 5, 40  # fields, characters
MEGATRONS_LENGTH = "chatgpt_output_token_length"  # in Megatron's prompt files; used with --num-tokens-from-file


@dataclass(frozen=True)
class RandomTokens:
    """Content of a synthetic prompt, drawn when the vocabulary is known."""

    count: int
    seed: str

    def draw(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Return the tokens, drawn from a vocabulary's ids."""
        return tuple(random.Random(self.seed).choices(ids, k=self.count))


@dataclass(frozen=True)
class Prompt:
    """Prompt to submit: text, token ids or a number of random ones, the request's settings, and its source."""

    content: str | tuple[int, ...] | RandomTokens
    params: RequestParams
    source: str  # "prompts.jsonl, line 3"


def read_prompts(run: RunConfig, defaults: RequestParams, *, seed: int = 0) -> list[Prompt]:
    """Return the prompts of a run: `--prompts`, else `--prompt-file`, else synthetic or the shipped ones.

    Args:
        run: Settings that name the prompts.
        defaults: Settings of a prompt without its own.
        seed: Seed of synthetic prompts.

    Raises:
        ConfigError: If the file cannot be read or is empty, or a line is wrong; names the line.
    """
    if run.prompts:
        prompts = [Prompt(text, defaults, f"--prompts, prompt {i}") for i, text in enumerate(run.prompts, start=1)]
        for prompt in prompts:
            if not prompt.content:
                raise ConfigError(f"{prompt.source} is empty; give at least one character")
            if _is_broken(str(prompt.content)):
                raise ConfigError(f"{prompt.source}: {_shown(prompt.content)} is not a text in UTF-8")
        return prompts
    if run.is_synthetic:
        return _synthetic_prompts(run, defaults, seed)
    if run.prompt_file is None:
        return example_prompts(defaults)
    if run.prompt_file == STANDARD_INPUT:
        return parse_lines(sys.stdin.buffer, "standard input", run, defaults)
    try:
        with open(run.prompt_file, "rb") as file:
            return parse_lines(file, run.prompt_file, run, defaults)
    except OSError as error:
        raise ConfigError(f"--prompt-file {run.prompt_file}: {error.strerror}") from None


def _synthetic_prompts(run: RunConfig, defaults: RequestParams, seed: int) -> list[Prompt]:
    """Return prompts of random tokens, with lengths uniform between the minimum and the maximum."""
    count, (shortest, longest) = run.synthetic_count, run.num_tokens_to_prompt or DEFAULT_PROMPT_TOKENS
    words = "%d synthetic prompts of %d to %d random tokens, %d to generate each"
    logger.info(words, count, shortest, longest, defaults.num_tokens_to_generate)
    lengths = random.Random(seed)
    contents = [RandomTokens(lengths.randint(shortest, longest), f"{seed} {index}") for index in range(count)]
    return [Prompt(content, defaults, f"synthetic prompt {i}") for i, content in enumerate(contents, start=1)]


def check_prompt_file(run: RunConfig) -> None:
    """Check that the prompt file, if one is named, can be opened; a pipe is not opened, which would end its writer."""
    if run.prompt_file in (None, STANDARD_INPUT):
        return
    try:
        if stat.S_ISREG(os.stat(run.prompt_file).st_mode):
            os.close(os.open(run.prompt_file, os.O_RDONLY))
    except OSError as error:
        raise ConfigError(f"--prompt-file {run.prompt_file}: {error.strerror}") from None


def example_prompts(defaults: RequestParams) -> list[Prompt]:
    """Return the shipped prompts: a long system prompt with several questions, and conversations turn by turn."""
    with (files("megatron_ext.offline") / "example_prompts.jsonl").open("rb") as file:
        return parse_lines(file, "example_prompts.jsonl", RunConfig(), defaults)


def parse_lines(lines: Iterable[bytes], name: str, run: RunConfig, defaults: RequestParams) -> list[Prompt]:
    """Parse JSON lines; blank ones are skipped.

    Args:
        run: Number of prompts to read, and the treatment of unknown fields and of Megatron's
            `chatgpt_output_token_length`. Unknown fields are errors by default: a mistyped `cache_salt` would let
            tenants share.
        defaults: Settings of a prompt without its own.

    Raises:
        ConfigError: There is no prompt, or a line is invalid: `name`, its number, and the reason.
    """
    prompts: list[Prompt] = []
    ignored: Counter[str] = Counter()
    for number, line in enumerate(lines, start=1):
        if len(prompts) == run.prompt_file_num_truncate:
            break
        if not line.strip():
            continue
        source = f"{name}, line {number}"
        try:
            prompts.append(_parse_line(line, run, defaults, source, ignored))
        except ValueError as error:  # ConfigError, JSONDecodeError and UnicodeDecodeError are ValueErrors
            raise ConfigError(f"{source}: {_reason(error)}") from None
    if not prompts:
        raise ConfigError(f'{name} has no prompt; write one JSON object per line, such as {{"text": "Hello"}}')
    if ignored:
        fields = ", ".join(f"{field[:_NAME_SHOWN]!r} ({count})" for field, count in ignored.most_common(_IGNORED_SHOWN))
        rest = ", ..." if len(ignored) > _IGNORED_SHOWN else ""
        logger.warning("%s: unknown fields are ignored; lines with each: %s%s", name, fields, rest)
    return prompts


def tokenize_prompts(prompts: Iterable[Prompt], tokenizer: Tokenizer, vocab_size: int) -> list[RequestInputs]:
    """Return requests of the prompts, checked against tokenizer and vocabulary before the first one runs.

    Raises:
        ConfigError: A prompt has no token, an invalid id, or an unsupported response format; names the first such
            prompt's source.
    """
    vocabulary, grammars, tokenized = Vocabulary(tokenizer, vocab_size), Grammars(tokenizer, vocab_size), []
    for prompt in prompts:
        content = prompt.content
        text = content if isinstance(content, str) else None
        try:
            tokens = _tokens(content, tokenizer, vocabulary)
            vocabulary.check_prompt(tokens)
            grammars.check(prompt.params.response_format)
        except ConfigError as error:
            raise ConfigError(f"{prompt.source}: {error}") from None
        if not tokens:
            raise ConfigError(f"{prompt.source}: the tokenizer returns no token for {_shown(prompt.content)}")
        tokenized.append(RequestInputs(tokens, prompt.params, text))
    return tokenized


def _tokens(
    content: str | tuple[int, ...] | RandomTokens, tokenizer: Tokenizer, vocabulary: Vocabulary
) -> tuple[int, ...]:
    if isinstance(content, str):
        return tuple(tokenize_prompt(tokenizer, content))
    return content.draw(vocabulary.ids) if isinstance(content, RandomTokens) else content


def _parse_line(line: bytes, run: RunConfig, defaults: RequestParams, source: str, ignored: Counter[str]) -> Prompt:
    fields = json.loads(line.decode("utf-8-sig"), object_pairs_hook=_unique_fields)
    if not isinstance(fields, dict):
        raise ConfigError('not a JSON object, such as {"text": "Hello"}')
    known = field_types(RequestParams)
    _sort_out_unknown(fields, (*_CONTENT_FIELDS, *known, MEGATRONS_LENGTH), run, ignored)
    content = _content(fields)
    own: FieldValues = {name: _checked(name, value, known[name]) for name, value in fields.items() if name in known}
    params = dataclasses.replace(defaults, **{**own, **_megatrons_length(fields, run)})
    if own.get("skip_prompt_log_probs") and not params.return_log_probs:
        raise ConfigError("skip_prompt_log_probs needs return_log_probs; set it or leave skip_prompt_log_probs out")
    return Prompt(content, params, source)


def _sort_out_unknown(fields: dict[str, object], known: tuple[str, ...], run: RunConfig, ignored: Counter[str]) -> None:
    """Count the unknown fields, or refuse the first of them."""
    unknown = sorted(set(fields) - set(known))
    if unknown and not run.ignore_unknown_prompt_fields:
        raise ConfigError(
            f"unknown field {unknown[0][:_NAME_SHOWN]!r}; known are {', '.join(known)}; "
            "--ignore-unknown-prompt-fields ignores others"
        )
    ignored.update(unknown)


def _megatrons_length(fields: dict[str, object], run: RunConfig) -> dict[str, int]:
    """Return the generation length of Megatron's field; without the flag, only check that it is a number."""
    if MEGATRONS_LENGTH not in fields:
        if run.num_tokens_from_file:
            raise ConfigError(f"--num-tokens-from-file needs {MEGATRONS_LENGTH}, which this line lacks")
        return {}
    length = _checked(MEGATRONS_LENGTH, fields[MEGATRONS_LENGTH], FieldType(int))
    if not run.num_tokens_from_file:
        return {}
    if "num_tokens_to_generate" in fields:
        raise ConfigError(
            f"with --num-tokens-from-file {MEGATRONS_LENGTH} and num_tokens_to_generate contradict each other; give "
            "one of them"
        )
    assert isinstance(length, int), "checked"
    if length < 1:
        raise ConfigError(f"{MEGATRONS_LENGTH} {length} must be at least 1")
    return {"num_tokens_to_generate": length}


def _content(fields: dict[str, object]) -> str | tuple[int, ...]:
    given = [name for name in _CONTENT_FIELDS if name in fields]
    if len(given) != 1:
        raise ConfigError(f"has {'both' if given else 'neither'} text {'and' if given else 'nor'} token_ids; give one")
    value = fields[given[0]]
    if given == ["text"]:
        if not isinstance(value, str) or not value:
            raise ConfigError(f"text {_shown(value)} is not a text of at least one character")
        if _is_broken(value):
            raise ConfigError(f"text {_shown(value)} has half of a surrogate pair, which is not a character")
        return value
    if not isinstance(value, list) or not value or not all(type(token) is int and token >= 0 for token in value):
        raise ConfigError(f"token_ids {_shown(value)} is not a list of at least one whole number, zero or more")
    return tuple(value)


def _is_broken(text: str) -> bool:
    """Return whether the text has lone surrogates, from JSON escapes or from bytes of another encoding."""
    return any("\ud800" <= character <= "\udfff" for character in text)


def _checked(name: str, value: object, kind: FieldType) -> object:
    try:
        return kind.convert(value)
    except MismatchError as error:
        raise ConfigError(f"{name} {_shown(value)} is not {error}") from None


def _unique_fields(pairs: list[tuple[str, Any]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"field {twice!r} is given twice")
    return fields


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _reason(error: ValueError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON: {error.msg} (column {error.colno})"
    if isinstance(error, UnicodeDecodeError):
        return "not a text in UTF-8"
    return str(error)
